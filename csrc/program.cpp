#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "pack.h"

namespace slipstream {

// One run on all its rows, or on those picked: what operations see.
struct Program::Context {
  Program& program;
  Team& team;
  const Kernels& kernels;
  const Input& input;
  const int64_t rows;

  // Shares of attention, the same for every layer.
  struct Share {
    int64_t span, begin, end, kv_head, first, last;
    int64_t partial;  // where its partial results begin, in states
    bool is_whole;    // no other share continues it
  };
  std::vector<Share> shares;
  struct Join {
    int64_t row, head;        // whose output
    int64_t partial, stride;  // the first state and the distance between those of partitions
    int64_t count;
  };
  std::vector<Join> joins;
  std::vector<float> partials;
  const int64_t block = kernels.block_rows(rows);  // of activations

  Rows at(View view) const {
    return {program.memory_[view.buffer] + view.offset, program.widths_[view.buffer]};
  }
  Activations codes(int index) const {
    Codes& own = program.codes_[index];
    Activations x{rows, own.columns, block, own.codes.data(), own.scales.data(), own.totals.data(), {}};
    for (size_t i = 0; i < std::size(kOffsets); ++i)
      if (own.has_starts[i]) x.starts[i] = own.starts[i].data();
    return x;
  }
  // Calls f(row) for a share of all rows that is this thread's own.
  template <class Function>
  void each_row(int thread, Function f) const {
    int64_t size = team.size();
    for (int64_t row = rows * thread / size; row < rows * (thread + 1) / size; ++row) f(row);
  }

  void plan_attention(int64_t num_heads);
};

// Shares are whole unless there are too few of them to go round; what they compute is the same.
void Program::Context::plan_attention(int64_t num_heads) {
  const int64_t kv_heads = input.pages.num_kv_heads, heads = num_heads / kv_heads, size = input.pages.head_dim + 2;
  int64_t num_blocks = 0;
  for (const auto& span : input.spans) num_blocks += (span.num_rows + kAttendRows - 1) / kAttendRows;
  const bool is_split = num_blocks * kv_heads < 4 * team.size();
  int64_t partial = 0;
  for (int64_t s = 0; s < (int64_t)input.spans.size(); ++s) {
    const auto& span = input.spans[s];
    for (int64_t begin = 0; begin < span.num_rows; begin += kAttendRows) {
      const int64_t end = std::min(begin + kAttendRows, span.num_rows);
      // Of a tree no row sees more keys than there are.
      const int64_t longest = span.num_computed + (span.num_masked ? span.num_rows : end);
      const int64_t parts = num_partitions(longest);
      const int64_t stride = (end - begin) * heads * size;
      for (int64_t kv = 0; kv < kv_heads; ++kv) {
        if (!is_split || parts == 1) {
          shares.push_back({s, begin, end, kv, 0, parts, partial, true});
          partial += stride;
          continue;
        }
        for (int64_t row = begin; row < end; ++row)
          for (int64_t h = 0; h < heads; ++h)
            joins.push_back({span.first_row + row, kv * heads + h, partial + ((row - begin) * heads + h) * size, stride, parts});
        for (int64_t part = 0; part < parts; ++part, partial += stride)
          shares.push_back({s, begin, end, kv, part, part + 1, partial, false});
      }
    }
  }
  // The longest first, so that threads end together.
  std::stable_sort(shares.begin(), shares.end(), [&](const Share& a, const Share& b) {
    auto work = [&](const Share& x) {
      const auto& span = input.spans[x.span];
      const int64_t keys = std::min(partition_begin(x.last), span.num_computed + span.num_rows);
      return (x.end - x.begin) * (keys - partition_begin(x.first));
    };
    return work(a) > work(b);
  });
  partials.resize((size_t)partial);
  for (auto& scratch : program.attend_scratch_) scratch.resize((size_t)attend_scratch_floats(input.pages.head_dim, heads));
}

struct Program::Embed : Op {
  Part table;
  int64_t columns;
  View out;
  void run(Context& c, int thread) override {
    c.each_row(thread, [&](int64_t r) {
      unpack_row(table.format, table.data, c.input.ids[r], columns, c.at(out).row(r));
    });
  }
};

struct Program::Load : Op {
  int64_t width;
  View out;
  void run(Context& c, int thread) override {
    c.each_row(thread, [&](int64_t r) {
      std::memcpy(c.at(out).row(r), c.input.hidden + r * width, (size_t)width * 4);
    });
  }
};

struct Program::Scale : Op {
  View in, out;
  float factor;
  int64_t width;
  void run(Context& c, int thread) override {
    c.each_row(thread, [&](int64_t r) { c.kernels.scale(c.at(in).row(r), factor, width, c.at(out).row(r)); });
  }
};

struct Program::Norm : Op {
  View in, out;
  const float* weight;
  float eps;
  int64_t width, heads;
  int out_codes;
  void run(Context& c, int thread) override {
    c.each_row(thread, [&](int64_t r) {
      float* row = c.at(out).row(r);
      for (int64_t h = 0; h < heads; ++h)
        c.kernels.rms_norm(c.at(in).row(r) + h * width, weight, eps, width, row + h * width);
      if (out_codes >= 0) c.kernels.quantize(c.at(out), c.codes(out_codes), r, r + 1, 0, heads * width / kGroup);
    });
  }
};

struct Program::Quantize : Op {
  View in;
  int out_codes;
  void run(Context& c, int thread) override {
    Activations out = c.codes(out_codes);
    c.each_row(thread, [&](int64_t r) { c.kernels.quantize(c.at(in), out, r, r + 1, 0, out.columns / kGroup); });
  }
};

struct Program::Linear : Op {
  LinearOp op;
  Stretches work;  // tiles; of gated layers, groups of 32 outputs
  void reset(int threads) override;
  void run(Context& c, int thread) override;
  // A tile's place: tiles are counted through all parts.
  struct Place {
    const Part& part;
    int64_t tile;    // within the part
    int64_t column;  // of the output
  };
  Place place(int64_t tile) const;
  int64_t num_tiles() const;
  void multiply(Context& c, int thread, int64_t tile, float* out);
  void finish(Context& c, int64_t tile, const float* sums);
};

Program::Linear::Place Program::Linear::place(int64_t tile) const {
  int64_t column = 0;
  size_t p = 0;
  for (; tile >= op.parts[p].num_tiles(); ++p) {
    tile -= op.parts[p].num_tiles();
    column += op.parts[p].rows;
  }
  return {op.parts[p], tile, column + tile * kTileRows};
}

int64_t Program::Linear::num_tiles() const {
  int64_t tiles = 0;
  for (const Part& part : op.parts) tiles += part.num_tiles();
  return tiles;
}

// Raw sums of one tile: [rows, 16].
void Program::Linear::multiply(Context& c, int thread, int64_t tile, float* out) {
  const Place at = place(tile);
  with_layout(at.part.format, [&](auto layout) {
    using L = decltype(layout);
    const uint8_t* data = at.part.data + at.tile * tile_bytes<L>(op.columns);
    if constexpr (L::is_float) c.kernels.float_tile(L::kind, data, c.at(op.in), c.rows, op.columns, out);
    else c.kernels.linear_tile(L::kind, data, c.codes(op.codes), out, c.program.unpacked_[thread].data());
  });
}

// Bias, residual and the tile's place in the output.
void Program::Linear::finish(Context& c, int64_t tile, const float* sums) {
  const Place at = place(tile);
  const int64_t width = std::min<int64_t>(kTileRows, at.part.rows - at.tile * kTileRows);
  const Rows residual = op.residual.buffer < 0 ? Rows{nullptr, 0} : c.at(op.residual).from(at.column);
  c.kernels.write_tile(sums, c.rows, width, op.bias ? op.bias + at.column : nullptr, residual, c.at(op.out).from(at.column));
}

// Two tiles of gate and two of up make a group of 32 outputs, which can be quantised at once.
void Program::Linear::reset(int threads) {
  work.reset(op.gate == LinearOp::Gate::none ? num_tiles() : num_tiles() / 4, threads);
}

void Program::Linear::run(Context& c, int thread) {
  float* sums = c.program.tiles_[thread].data();
  if (op.gate == LinearOp::Gate::none) {
    work.each(thread, [&](int64_t first, int64_t last) {
      for (int64_t tile = first; tile < last; ++tile) {
        multiply(c, thread, tile, sums);
        finish(c, tile, sums);
      }
    });
    return;
  }
  const int64_t half = num_tiles() / 2, size = c.rows * kTileRows;
  const Rows none = {nullptr, 0}, coded = {sums + 2 * size, kGroup};
  work.each(thread, [&](int64_t first, int64_t last) {
    for (int64_t group = first; group < last; ++group) {
      const Rows out = op.out_codes >= 0 ? coded : c.at(op.out).from(group * kGroup);
      for (int64_t t = 0; t < 2; ++t) {
        multiply(c, thread, 2 * group + t, sums);
        multiply(c, thread, half + 2 * group + t, sums + size);
        c.kernels.gated(sums, sums + size, size, op.gate == LinearOp::Gate::gelu, sums);
        c.kernels.write_tile(sums, c.rows, kTileRows, nullptr, none, out.from(t * kTileRows));
      }
      if (op.out_codes >= 0) c.kernels.quantize(coded, c.codes(op.out_codes), 0, c.rows, group, group + 1);
    }
  });
}

struct Program::Rotate : Op {
  View in, out;
  int angles;
  int64_t heads, head_dim;
  void run(Context& c, int thread) override {
    const float *cosines = c.program.cosines_[angles].data(), *sines = c.program.sines_[angles].data();
    const int64_t half = head_dim / 2;
    c.each_row(thread, [&](int64_t r) {
      for (int64_t h = 0; h < heads; ++h)
        c.kernels.rotate(c.at(in).row(r) + h * head_dim, cosines + r * half, sines + r * half, half,
                         c.at(out).row(r) + h * head_dim);
    });
  }
};

struct Program::Attend : Op {
  Counter counter, second;  // shares, then joins
  void reset(int) override {
    counter.reset();
    second.reset();
  }
  int64_t layer;
  View q, k, v, out;
  int64_t heads;
  float scale;
  int64_t window;
  int out_codes;
  void run(Context& c, int thread) override;
  void finish(Context& c, int64_t row, int64_t head, const float* partial) const;
};

void Program::Attend::finish(Context& c, int64_t row, int64_t head, const float* partial) const {
  const int64_t d = c.input.pages.head_dim;
  float* to = c.at(out).row(row) + head * d;
  c.kernels.finish(partial, d, to);
  if (out_codes >= 0) {
    const int64_t groups = d / kGroup;
    Rows rows = {to - row * c.at(out).stride, c.at(out).stride};
    c.kernels.quantize(rows, c.codes(out_codes), row, row + 1, head * groups, (head + 1) * groups);
  }
}

void Program::Attend::run(Context& c, int thread) {
  Pages pages = c.input.pages;
  pages.keys = c.input.pool + 2 * layer * c.input.layer_bytes;
  pages.values = (uint8_t*)pages.keys + c.input.layer_bytes;
  const int64_t width = pages.num_kv_heads * pages.head_dim, size = pages.kind == Narrow::f32 ? 4 : 2;
  c.each_row(thread, [&](int64_t r) {
    int64_t at = c.input.slots[r] * width * size;
    c.kernels.narrow(c.at(k).row(r), width, pages.kind, (uint8_t*)pages.keys + at);
    c.kernels.narrow(c.at(v).row(r), width, pages.kind, (uint8_t*)pages.values + at);
  });
  c.team.barrier();

  const AttentionShape shape = {heads, window, scale};
  const int64_t group = heads / pages.num_kv_heads, state = pages.head_dim + 2;
  for (int64_t i; (i = counter.take(1)) < (int64_t)c.shares.size();) {
    const auto& share = c.shares[i];
    const AttentionSpan& span = c.input.spans[share.span];
    float* partial = c.partials.data() + share.partial;
    c.kernels.attend(span, pages, shape, c.at(q), share.begin, share.end, share.kv_head, share.first, share.last,
                     partial, c.program.attend_scratch_[thread].data());
    if (!share.is_whole) continue;
    for (int64_t r = share.begin; r < share.end; ++r)
      for (int64_t h = 0; h < group; ++h, partial += state)
        finish(c, span.first_row + r, share.kv_head * group + h, partial);
  }
  if (c.joins.empty()) return;
  c.team.barrier();
  for (int64_t i; (i = second.take(1)) < (int64_t)c.joins.size();) {
    const auto& join = c.joins[i];
    float* into = c.partials.data() + join.partial;
    for (int64_t part = 1; part < join.count; ++part) c.kernels.merge(into, into + part * join.stride, pages.head_dim);
    finish(c, join.row, join.head, into);
  }
}

struct Program::Gated : Op {
  View in, out;
  int64_t width;
  bool gelu;
  void run(Context& c, int thread) override {
    c.each_row(thread, [&](int64_t r) {
      c.kernels.gated(c.at(in).row(r), c.at(in).row(r) + width, width, gelu, c.at(out).row(r));
    });
  }
};

struct Program::Add : Op {
  View a, b, out;
  int64_t width;
  void run(Context& c, int thread) override {
    c.each_row(thread, [&](int64_t r) { c.kernels.add(c.at(a).row(r), c.at(b).row(r), width, c.at(out).row(r)); });
  }
};

struct Program::Pick : Op {
  View in, out;
  int64_t width;
  void run(Context& c, int thread) override {
    c.each_row(thread, [&](int64_t r) {
      std::memcpy(c.at(out).row(r), c.at(in).row(c.input.picked[r]), (size_t)width * 4);
    });
  }
};

// ---------------------------------------------------------------- recording

int Program::buffer(int64_t width, bool is_picked) {
  widths_.push_back(width);
  is_picked_.push_back(is_picked);
  capacity_ = 0;
  return (int)widths_.size() - 1;
}

int Program::codes(int64_t columns) {
  codes_.emplace_back().columns = columns;
  capacity_ = 0;
  return (int)codes_.size() - 1;
}

int Program::angles(std::vector<float> inverse_frequencies) {
  angle_frequencies_.push_back(std::move(inverse_frequencies));
  capacity_ = 0;
  return (int)angle_frequencies_.size() - 1;
}

void Program::append(std::unique_ptr<Op> op, View out) {
  op->is_picked = is_picked_[out.buffer];
  ops_.push_back(std::move(op));
}

#define SLIPSTREAM_APPEND(Kind, rows_like, ...) \
  do {                                         \
    auto op = std::make_unique<Kind>();        \
    __VA_ARGS__                                \
    append(std::move(op), rows_like);          \
  } while (0)

void Program::embed(Part table, int64_t columns, View out) {
  SLIPSTREAM_APPEND(Embed, out, op->table = table; op->columns = columns; op->out = out;);
}

void Program::load(int64_t width, View out) { SLIPSTREAM_APPEND(Load, out, op->width = width; op->out = out;); }

void Program::scale(View in, float factor, int64_t width, View out) {
  SLIPSTREAM_APPEND(Scale, out, op->in = in; op->factor = factor; op->width = width; op->out = out;);
}

void Program::rms_norm(View in, const float* weight, float eps, int64_t width, int64_t heads, View out, int out_codes) {
  SLIPSTREAM_APPEND(Norm, out, op->in = in; op->weight = weight; op->eps = eps; op->width = width; op->heads = heads;
                    op->out = out; op->out_codes = out_codes;);
}

void Program::quantize(View in, int out_codes) {
  SLIPSTREAM_APPEND(Quantize, in, op->in = in; op->out_codes = out_codes;);
}

void Program::linear(LinearOp linear) {
  scratch_columns_ = std::max(scratch_columns_, linear.columns);
  for (const Part& part : linear.parts) {
    const int index = with_layout(part.format, [](auto layout) { return decltype(layout)::offset_index; });
    if (index >= 0) codes_[linear.codes].has_starts[index] = true;
  }
  capacity_ = 0;
  SLIPSTREAM_APPEND(Linear, linear.out, op->op = linear;);
}

void Program::rotate(View in, int angles, int64_t heads, int64_t head_dim, View out) {
  SLIPSTREAM_APPEND(Rotate, out, op->in = in; op->angles = angles; op->heads = heads; op->head_dim = head_dim;
                    op->out = out;);
}

void Program::attend(int64_t layer, View q, View k, View v, int64_t heads, float scale, int64_t window, View out,
                     int out_codes) {
  num_heads_ = heads;
  SLIPSTREAM_APPEND(Attend, out, op->layer = layer; op->q = q; op->k = k; op->v = v; op->heads = heads;
                    op->scale = scale; op->window = window; op->out = out; op->out_codes = out_codes;);
}

void Program::gated(View in, int64_t width, bool gelu, View out) {
  SLIPSTREAM_APPEND(Gated, out, op->in = in; op->width = width; op->gelu = gelu; op->out = out;);
}

void Program::add(View a, View b, int64_t width, View out) {
  SLIPSTREAM_APPEND(Add, out, op->a = a; op->b = b; op->width = width; op->out = out;);
}

void Program::pick(View in, int64_t width, View out) {
  SLIPSTREAM_APPEND(Pick, out, op->in = in; op->width = width; op->out = out;);
}

void Program::output(int buffer) {
  outputs_.push_back(buffer);
  capacity_ = 0;
}

// ---------------------------------------------------------------- running

void Program::reserve(int64_t rows, int threads) {
  if (rows <= capacity_ && threads == num_threads_) return;
  capacity_ = rows;
  num_threads_ = threads;
  auto resize = [](auto& vectors, size_t count, auto size) {
    vectors.resize(count);
    for (size_t i = 0; i < count; ++i) vectors[i].resize((size_t)size(i));
  };
  const size_t angles = angle_frequencies_.size();
  auto is_output = [&](size_t i) { return std::find(outputs_.begin(), outputs_.end(), (int)i) != outputs_.end(); };
  resize(buffers_, widths_.size(), [&](size_t i) { return is_output(i) ? 0 : rows * widths_[i]; });
  for (Codes& own : codes_) {
    const size_t size = (size_t)(rows * own.columns);
    own.codes.resize(size);
    own.scales.resize(size / kGroup);
    own.totals.resize(size / kGroup);
    for (size_t i = 0; i < std::size(kOffsets); ++i)
      if (own.has_starts[i]) own.starts[i].resize(2 * size / kGroup);
  }
  resize(cosines_, angles, [&](size_t i) { return rows * (int64_t)angle_frequencies_[i].size(); });
  resize(sines_, angles, [&](size_t i) { return rows * (int64_t)angle_frequencies_[i].size(); });
  resize(unpacked_, (size_t)threads, [&](size_t) { return linear_scratch_bytes(scratch_columns_); });
  resize(tiles_, (size_t)threads, [&](size_t) { return rows * 4 * kTileRows; });
  attend_scratch_.resize((size_t)threads);
  memory_.resize(buffers_.size());
  for (size_t i = 0; i < buffers_.size(); ++i) memory_[i] = buffers_[i].data();
}

void Program::run(Team& team, const Kernels& kernels, const Input& input, const std::vector<float*>& outputs) {
  if (input.rows == 0) return;
  std::lock_guard one_at_a_time(running_);
  reserve(std::max(input.rows, input.picked_rows), team.size());
  for (size_t i = 0; i < outputs.size(); ++i) memory_[outputs_[i]] = outputs[i];
  Context all{*this, team, kernels, input, input.rows, {}, {}, {}};
  Context picked{*this, team, kernels, input, input.picked_rows, {}, {}, {}};
  if (num_heads_) all.plan_attention(num_heads_);
  for (auto& op : ops_) op->reset(team.size());
  team.run([&](int thread) {
    for (size_t kind = 0; kind < angle_frequencies_.size(); ++kind) {
      const auto& frequencies = angle_frequencies_[kind];
      all.each_row(thread, [&](int64_t r) {
        for (size_t i = 0; i < frequencies.size(); ++i) {
          float angle = (float)input.positions[r] * frequencies[i];
          cosines_[kind][r * frequencies.size() + i] = std::cos(angle);
          sines_[kind][r * frequencies.size() + i] = std::sin(angle);
        }
      });
    }
    for (auto& op : ops_) {
      Context& context = op->is_picked ? picked : all;
      if (context.rows == 0) continue;
      op->run(context, thread);
      team.barrier();
    }
  });
}

}  // namespace slipstream
