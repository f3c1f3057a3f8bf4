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
  int64_t rows;
  const int64_t *ids, *positions, *slots;
  std::vector<AttentionSpan> spans;
  uint8_t* pool;  // [layers, 2, bytes of a layer's keys or values]
  int64_t layer_bytes;
  Pages pages;    // shape only
  const float* hidden;  // what `load` reads, for programs that begin with rows of floats
};

class Program {
 public:
  // Buffers; sizes grow with the rows of a run.
  int buffer(int64_t width);
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
  void output(View in, int64_t width, int index);

  // Run on so many rows; outputs[i] is [rows, width].
  void run(Team& team, const Kernels& kernels, const Input& input, const std::vector<float*>& outputs);

 private:
  struct Context;
  struct Op {
    virtual ~Op() = default;
    virtual void run(Context& context, int thread) = 0;
    Counter counter, second;
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
  struct Output;

  void reserve(int64_t rows);

  std::vector<int64_t> widths_, code_columns_;
  std::vector<std::vector<float>> angle_frequencies_;
  std::vector<std::unique_ptr<Op>> ops_;
  int64_t scratch_columns_ = 0, num_heads_ = 0;
  std::mutex running_;

  int64_t capacity_ = 0;
  std::vector<std::vector<float>> buffers_;
  std::vector<std::vector<int8_t>> codes_;
  std::vector<std::vector<float>> code_scales_, code_totals_;
  std::vector<std::vector<int32_t>> code_sums_;
  std::vector<std::vector<float>> cosines_, sines_;
};

}  // namespace slipstream
