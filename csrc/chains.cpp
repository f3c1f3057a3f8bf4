#include "chains.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace slipstream {
namespace {

// What the next pass is made of.
struct Pass {
  std::vector<int64_t> ids, positions, slots, picked;
  std::vector<AttentionSpan> spans;
  std::vector<float> hidden;

  void add(int64_t id, int64_t position, int64_t slot, AttentionSpan span, const float* feature, int64_t width) {
    span.first_row = (int64_t)ids.size();
    ids.push_back(id);
    positions.push_back(position);
    slots.push_back(slot);
    picked.push_back(span.first_row);
    spans.push_back(span);
    hidden.insert(hidden.end(), feature, feature + width);
  }
};

}  // namespace

std::vector<std::vector<int64_t>> draft_chains(Program& program, Team& team, const Kernels& kernels, Input input,
                                               const std::vector<int64_t>& lengths, const int64_t* tokens,
                                               int64_t num_tokens) {
  const int64_t width = program.output_width(0), num_columns = program.output_width(1);
  const int64_t block_size = input.pages.block_size;
  std::vector<std::vector<int64_t>> chains(lengths.size());
  std::vector<size_t> owners(lengths.size());  // the chain each picked row is of
  std::iota(owners.begin(), owners.end(), 0);
  std::vector<float> features(lengths.size() * (size_t)width), logits(lengths.size() * (size_t)num_columns);
  Pass pass;
  while (!owners.empty()) {
    program.run(team, kernels, input, {features.data(), logits.data()});
    Pass next;
    std::vector<size_t> going_on;
    for (size_t row = 0; row < owners.size(); ++row) {
      const float *first = logits.data() + row * (size_t)num_columns, *last = first + num_tokens;
      const float best = kernels.maximum(first, 0, num_tokens);
      if (!std::isfinite(best)) continue;
      std::vector<int64_t>& chain = chains[owners[row]];
      chain.push_back(tokens[std::find(first, last, best) - first]);
      if ((int64_t)chain.size() == lengths[owners[row]]) continue;
      AttentionSpan span = input.spans[row];
      span.num_computed += span.num_rows;
      span.num_rows = 1;
      const int64_t slot = span.table[span.num_computed / block_size] * block_size + span.num_computed % block_size;
      next.add(chain.back(), input.positions[input.picked[row]] + 1, slot, span, features.data() + row * (size_t)width,
               width);
      going_on.push_back(owners[row]);
    }
    pass = std::move(next);
    owners = std::move(going_on);
    input.rows = input.picked_rows = (int64_t)pass.ids.size();
    input.ids = pass.ids.data();
    input.positions = pass.positions.data();
    input.slots = pass.slots.data();
    input.picked = pass.picked.data();
    input.spans = pass.spans;
    input.hidden = pass.hidden.data();
  }
  return chains;
}

}  // namespace slipstream
