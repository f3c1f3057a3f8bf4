// A model's forward pass as a list of operations over rows of floats, run in one call.
//
// Python records the list once; a run has any number of rows. Values live in buffers [rows, width]
// that the program owns. All threads walk the list together, share each operation's work, and meet
// at a barrier after it.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace slipstream {

// A column range of a buffer; operations know how wide it is.
struct View {
  int buffer = -1;
  int64_t offset = 0;
};

// One stack of output rows in one format.
struct Part {
  Format format;
  const uint8_t* data;
  int64_t rows;
  int64_t num_tiles() const { return (rows + kTileRows - 1) / kTileRows; }
};

// Everything a linear layer needs. Columns of `out`: the parts one after another.
struct LinearOp {
  std::vector<Part> parts;
  int64_t columns = 0;
  View in, out;               // in: floats, for float formats
  int codes = -1;             // in: codes, for the others
  const float* bias = nullptr;
  View residual;              // added to the result, if there is one
  enum class Gate { none, silu, gelu } gate = Gate::none;  // act(first half) * second half
  int out_codes = -1;         // quantise the (gated) result as well
};

struct Input {
  int64_t rows, picked_rows;
  const int64_t* picked;  // which rows `pick` keeps
  const int64_t *ids, *positions, *slots;
  std::vector<AttentionSpan> spans;
  uint8_t* pool;  // [layers, 2, bytes of a layer's keys or values]
  int64_t layer_bytes;
  Pages pages;    // shape only
  const float* hidden;  // what `load` reads, for programs that begin with rows of floats
};

class Program {
 public:
  // Buffers; sizes grow with the rows of a run. Those of picked values have a run's picked rows.
  int buffer(int64_t width, bool is_picked);
  int codes(int64_t columns);

  void embed(Part table, int64_t columns, View out);
  void load(int64_t width, View out);
  void scale(View in, float factor, int64_t width, View out);
  void rms_norm(View in, const float* weight, float eps, int64_t width, int64_t heads, View out, int out_codes);
  void quantize(View in, int out_codes);
  void linear(LinearOp op);
  int angles(std::vector<float> inverse_frequencies);
  void rotate(View in, int angles, int64_t heads, int64_t head_dim, View out);
  void attend(int64_t layer, View q, View k, View v, int64_t heads, float scale, int64_t window, View out, int out_codes);
  void gated(View in, int64_t width, bool gelu, View out);
  void add(View a, View b, int64_t width, View out);
  void pick(View in, int64_t width, View out);
  void output(int buffer);  // the caller's memory takes this buffer's place

  int64_t output_rows(size_t index, const Input& input) const { return rows_of(outputs_[index], input); }
  int64_t output_width(size_t index) const { return widths_[outputs_[index]]; }
  bool has_angles() const { return !angle_frequencies_.empty(); }
  bool has_attention() const { return num_heads_ > 0; }
  size_t num_outputs() const { return outputs_.size(); }

  // Run on so many rows; outputs in the order they were declared.
  void run(Team& team, const Kernels& kernels, const Input& input, const std::vector<float*>& outputs);

 private:
  struct Context;
  struct Op {
    virtual ~Op() = default;
    virtual void reset([[maybe_unused]] int threads) {}  // before a run
    virtual void run(Context& context, int thread) = 0;
    bool is_picked = false;
  };
  struct Embed;
  struct Load;
  struct Scale;
  struct Norm;
  struct Quantize;
  struct Linear;
  struct Rotate;
  struct Attend;
  struct Gated;
  struct Add;
  struct Pick;

  // What Activations points to.
  struct Codes {
    int64_t columns;
    bool has_starts[std::size(kOffsets)] = {};  // which weights it meets
    std::vector<int8_t> codes;
    std::vector<float> scales, totals;
    std::vector<int32_t> starts[std::size(kOffsets)];
  };

  void append(std::unique_ptr<Op> op, View out);
  void reserve(int64_t rows, int threads);
  int64_t rows_of(int buffer, const Input& input) const {
    return is_picked_[buffer] ? input.picked_rows : input.rows;
  }

  std::vector<int64_t> widths_;
  std::vector<bool> is_picked_;
  std::vector<int> outputs_;
  std::vector<std::vector<float>> angle_frequencies_;
  std::vector<std::unique_ptr<Op>> ops_;
  int64_t scratch_columns_ = 0, num_heads_ = 0;
  std::mutex running_;

  int64_t capacity_ = 0;
  int num_threads_ = 0;
  std::vector<std::vector<float>> buffers_;
  std::vector<float*> memory_;  // where each buffer lies in this run
  std::vector<Codes> codes_;
  std::vector<std::vector<float>> cosines_, sines_;
  // Of each thread.
  std::vector<std::vector<float>> attend_scratch_, tiles_;
  std::vector<std::vector<uint8_t>> unpacked_;
};

}  // namespace slipstream
