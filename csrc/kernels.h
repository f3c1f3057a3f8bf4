// What each instruction set implements. The rest of the program calls through this table.
//
// Every output element is accumulated in one order, whatever the number of rows, threads or
// sequences computed beside it: that is what makes equal tokens equal bit for bit.
#pragma once
#include <cstdint>
#include <iterator>

#include "formats.h"

namespace slipstream {

// Rows of activations as 8-bit codes; a group of 32 columns shares a scale. Rows lie in blocks: the
// first groups of all rows of a block side by side, then their second groups, and so on, so that
// what a tile of weights meets is read from front to back. For each block of B rows:
struct Activations {
  int64_t rows, columns, block;  // the last block may have fewer rows
  int8_t* codes;    // [columns / 32, B, 32]
  float* scales;    // [columns / 32, B]
  float* totals;    // [columns / 32, B]: scale times the sum of the codes
  // Where integer sums begin for weights with each of kOffsets, or null: [columns / 32, B]; of
  // Q6_K's offset, whose groups are halved, [columns / 32, 2, B].
  int32_t* starts[std::size(kOffsets)];
};

// Rows of floats inside a wider buffer.
struct Rows {
  float* data;
  int64_t stride;
  float* row(int64_t i) const { return data + i * stride; }
  Rows from(int64_t column) const { return {data + column, stride}; }
};

enum class Narrow : int { f32, f16, bf16 };  // how keys and values are stored

// One sequence's share of an attention: queries first_row .. of the batch, over its own keys.
struct AttentionSpan {
  int64_t first_row, num_rows;
  int64_t num_computed;   // keys before those of its rows
  int64_t num_masked;     // of the last keys, those `ancestors` speaks of; 0 for a chain
  const uint8_t* ancestors;  // [num_rows, num_masked]: which of them a row sees
  const int64_t* table;   // its blocks
};

// The pages of one layer and how heads lie in them.
struct Pages {
  void *keys, *values;  // [num_blocks, block_size, num_kv_heads, head_dim]
  Narrow kind;
  int64_t block_size, num_kv_heads, head_dim;
};

struct AttentionShape {
  int64_t num_heads;
  int64_t window;  // how many positions back a query sees; 0 for all
  float scale;
};

// Keys are partitioned: the softmax over each part is accumulated apart from the others', then merged
// in order. The first 512 are in four parts, so that few threads share a short context evenly; each
// 512 after them are one, as every part costs a merge.
constexpr int64_t kPartition = 512, kEarlyPartition = 128, kEarlyPartitions = kPartition / kEarlyPartition;
inline int64_t partition_begin(int64_t part) {
  return part < kEarlyPartitions ? part * kEarlyPartition : (part - kEarlyPartitions + 1) * kPartition;
}
inline int64_t num_partitions(int64_t keys) {
  return keys <= kPartition ? (keys + kEarlyPartition - 1) / kEarlyPartition
                            : kEarlyPartitions - 1 + (keys + kPartition - 1) / kPartition;
}

// Most rows `attend` takes at once; they share the widened keys.
constexpr int64_t kAttendRows = 8;

struct NoiseRow;  // philox.h
class Finishers;  // sample.h

struct Kernels {
  const char* name;

  // How many of so many rows of activations make a block.
  int64_t (*block_rows)(int64_t rows);

  // Codes of rows [begin, end), groups [first, last); x begins at column 32 * first.
  void (*quantize)(Rows x, const Activations& out, int64_t begin, int64_t end, int64_t first, int64_t last);

  // out[r] = the 16 outputs of one tile for every row r. `scratch` holds scratch_bytes(columns).
  void (*linear_tile)(Format format, const uint8_t* tile, const Activations& x, float* out, uint8_t* scratch);

  // The same for float formats.
  void (*float_tile)(Format format, const uint8_t* tile, Rows x, int64_t rows, int64_t columns, float* out);

  // Outputs of one tile, [rows, 16], of which `width` count: out = residual + (sums + bias), without
  // those that are null.
  void (*write_tile)(const float* sums, int64_t rows, int64_t width, const float* bias, Rows residual, Rows out);

  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t width, float* out);

  // Halves (first, second) of one head turned by angles.
  void (*rotate)(const float* x, const float* cos, const float* sin, int64_t half, float* out);

  // act(gate) * up; `gelu` with the tanh approximation, else silu.
  void (*gated)(const float* gate, const float* up, int64_t width, bool gelu, float* out);

  void (*add)(const float* a, const float* b, int64_t width, float* out);
  void (*scale)(const float* a, float factor, int64_t width, float* out);

  void (*narrow)(const float* x, int64_t width, Narrow kind, void* out);

  // Rows [begin, end) of a span, one key head, keys of partitions [first, last). Of every (row,
  // query head of the group) the maximum, the sum and the weighted values, merged over the
  // partitions, go to partial[((row - begin) * heads_per_group + head) * (head_dim + 2)].
  void (*attend)(const AttentionSpan& span, const Pages& pages, const AttentionShape& shape, Rows q,
                 int64_t begin, int64_t end, int64_t kv_head, int64_t first, int64_t last, float* partial,
                 float* scratch);

  // Merge a partial into another, in order: into = into + from.
  void (*merge)(float* into, const float* from, int64_t head_dim);

  // Normalise a partial to its head's output.
  void (*finish)(const float* partial, int64_t head_dim, float* out);

  // The largest of scores [begin, end) of a row; +inf if one is NaN.
  float (*maximum)(const float* row, int64_t begin, int64_t end);

  // Tokens [begin, end) run their race; begin is a multiple of 4, `best` the largest of the row.
  void (*race)(const float* row, int64_t begin, int64_t end, float best, float temperature, const NoiseRow& noise,
               Finishers& finishers);
};

// Scratch of linear_tile: a tile unpacked to bytes, with its scales and minima.
inline int64_t linear_scratch_bytes(int64_t columns) { return columns / kGroup * (512 + 128); }

// Scratch of attend: widened keys and values of a tile, and the running state of every query.
inline int64_t attend_scratch_floats(int64_t head_dim, int64_t heads_per_group) {
  return 2 * 16 * head_dim + kAttendRows * heads_per_group * (head_dim + 2);
}

namespace scalar { extern const Kernels kernels; }
#if SLIPSTREAM_X86
namespace avx2 { extern const Kernels kernels; }
namespace avx2_vnni { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
#endif

}  // namespace slipstream
