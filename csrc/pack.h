// From the blocks of a GGUF file to tiles and back to floats. Values never change on the way.
#pragma once
#include <cstdint>

#include "formats.h"

namespace slipstream {

// Bytes of `rows` x `columns` packed weights; rows are padded with zeros to whole tiles.
int64_t packed_bytes(Format format, int64_t rows, int64_t columns);

// Bytes of one row as it lies in a GGUF file.
int64_t stored_row_bytes(Format format, int64_t columns);

// Ask for large pages, so that streaming weights does not wait for address translation. A hint.
void use_large_pages(uint8_t* data, int64_t bytes);

// Pack rows order[0], order[1], .. of `stored` (rows of GGUF blocks) into `packed`.
void pack(Format format, const uint8_t* stored, const int64_t* order, int64_t rows, int64_t columns, uint8_t* packed);

// The values of one packed row.
void unpack_row(Format format, const uint8_t* packed, int64_t row, int64_t columns, float* out);

}  // namespace slipstream
