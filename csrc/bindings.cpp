// The Python module `slipstream._native`. Tensors come in without a copy.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "chains.h"
#include "kernels.h"
#include "pack.h"
#include "program.h"
#include "sample.h"
#include "threads.h"

namespace nb = nanobind;
using namespace slipstream;

namespace {

template <class T, class... Shape>
using Array = nb::ndarray<T, nb::device::cpu, nb::c_contig, Shape...>;
using Floats = Array<float, nb::ndim<2>>;
using Longs = Array<const int64_t, nb::ndim<1>>;
using RawBytes = Array<uint8_t, nb::ndim<1>>;

struct Isa {
  const Kernels* kernels;
  bool is_supported;
};

std::vector<Isa> all_isas() {
  std::vector<Isa> isas;
#if SLIPSTREAM_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  isas.push_back({&avx512::kernels, avx512});
  isas.push_back({&avx2_vnni::kernels, avx2 && __builtin_cpu_supports("avxvnni")});
  isas.push_back({&avx2::kernels, avx2});
#endif
  isas.push_back({&scalar::kernels, true});
  return isas;
}

// What runs: the best instruction set, or one asked for, and the threads.
struct Machine {
  const Kernels* kernels = nullptr;
  std::shared_ptr<Team> team = std::make_shared<Team>(1);  // a run keeps the one it began with
};

Machine& machine() {
  static Machine the_machine = [] {
    Machine m;
    for (const Isa& isa : all_isas())
      if (isa.is_supported && !m.kernels) m.kernels = isa.kernels;
    return m;
  }();
  return the_machine;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Isa& isa : all_isas())
    if (isa.is_supported) names.push_back(isa.kernels->name);
  return names;
}

void use_isa(const std::string& name) {
  for (const Isa& isa : all_isas())
    if (isa.is_supported && name == isa.kernels->name) {
      machine().kernels = isa.kernels;
      return;
    }
  throw std::invalid_argument("this machine has no instruction set " + name);
}

void use_threads(int count) {
  if (count < 1) throw std::invalid_argument("at least one thread is needed");
  if (count != machine().team->size()) machine().team = std::make_shared<Team>(count);
}

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

void require_whole(Format format, int64_t columns) {
  const int64_t whole = with_layout(format, [](auto layout) -> int64_t { return decltype(layout)::columns; });
  require(columns % whole == 0, "columns do not fill whole blocks");
}

void pack_rows(int format, Array<const uint8_t, nb::ndim<2>> stored, Longs order, int64_t columns, RawBytes packed) {
  Format kind = (Format)format;
  require_whole(kind, columns);
  require(stored.shape(1) == (size_t)stored_row_bytes(kind, columns), "rows of another length");
  require(packed.size() == (size_t)packed_bytes(kind, (int64_t)order.size(), columns), "packed has another size");
  for (size_t i = 0; i < order.size(); ++i)
    require(order.data()[i] >= 0 && order.data()[i] < (int64_t)stored.shape(0), "order names a row that is not there");
  nb::gil_scoped_release release;
  pack(kind, stored.data(), order.data(), (int64_t)order.size(), columns, packed.data());
}

void unpack_rows(int format, RawBytes packed, Longs rows, Floats out) {
  const int64_t columns = (int64_t)out.shape(1);
  require_whole((Format)format, columns);
  require(rows.size() == out.shape(0), "as many rows as are asked for");
  for (size_t i = 0; i < rows.size(); ++i)
    require(rows.data()[i] >= 0 && (int64_t)packed.size() >= packed_bytes((Format)format, rows.data()[i] + 1, columns),
            "a row that is not there");
  const std::shared_ptr<Team> team = machine().team;
  nb::gil_scoped_release release;
  team->run([&](int thread) {
    const int64_t count = (int64_t)rows.size(), size = team->size();
    for (int64_t i = count * thread / size; i < count * (thread + 1) / size; ++i)
      unpack_row((Format)format, packed.data(), rows.data()[i], columns, out.data() + i * columns);
  });
}

using NoiseWords = Array<const int64_t, nb::shape<-1, 5>>;  // seed, branch, position, stream, origin

std::vector<NoiseRow> noise_rows(const NoiseWords& words, int64_t rows) {
  require((int64_t)words.shape(0) == rows, "as many rows of noise as of scores");
  std::vector<NoiseRow> out;
  for (const int64_t* w = words.data(); w < words.data() + 5 * rows; w += 5)
    out.push_back({(uint64_t)w[0], (uint64_t)w[1], (uint64_t)w[2], (uint64_t)w[3], (uint64_t)w[4]});
  return out;
}

bool race_rows(Array<const float, nb::ndim<2>> scores, Array<const float, nb::ndim<1>> temperature, NoiseWords words,
               Array<int64_t, nb::ndim<2>> tokens) {
  const int64_t rows = (int64_t)scores.shape(0), count = (int64_t)tokens.shape(1);
  const std::vector<NoiseRow> noise = noise_rows(words, rows);
  require((int64_t)temperature.size() == rows && (int64_t)tokens.shape(0) == rows,
          "as many temperatures and rows of tokens as of scores");
  require(count > 0 && count <= (int64_t)scores.shape(1), "more finishers than tokens, or none");
  for (int64_t row = 0; row < rows; ++row)
    require(temperature.data()[row] > 0.0f || (temperature.data()[row] == 0.0f && count == 1),
            "temperature 0 has one finisher, and none is below");
  const std::shared_ptr<Team> team = machine().team;
  const Kernels& kernels = *machine().kernels;
  nb::gil_scoped_release release;
  return race(*team, kernels, {scores.data(), temperature.data(), noise.data(), rows, (int64_t)scores.shape(1), count},
              tokens.data());
}

void uniform_rows(NoiseWords words, Floats out) {
  const std::vector<NoiseRow> noise = noise_rows(words, (int64_t)out.shape(0));
  const std::shared_ptr<Team> team = machine().team;
  nb::gil_scoped_release release;
  uniforms(*team, noise.data(), (int64_t)out.shape(0), (int64_t)out.shape(1), out.data());
}

using PartTuple = std::tuple<int, RawBytes, int64_t>;  // format, packed, rows
using ViewTuple = std::tuple<int, int64_t>;

View view(const ViewTuple& v) { return {std::get<0>(v), std::get<1>(v)}; }

Part part(const PartTuple& p, int64_t columns) {
  Part out{(Format)std::get<0>(p), std::get<1>(p).data(), std::get<2>(p)};
  require_whole(out.format, columns);
  require(std::get<1>(p).size() == (size_t)packed_bytes(out.format, out.rows, columns), "packed weights of another size");
  return out;
}

// Keeps alive what the operations point to.
struct PyProgram {
  Program program;
  int64_t num_ids = 0;  // rows of the embedding
  std::vector<RawBytes> packed;
  std::vector<Array<const float, nb::ndim<1>>> vectors;

  Part keep(const PartTuple& p, int64_t columns) {
    packed.push_back(std::get<1>(p));
    return part(p, columns);
  }
  const float* keep(const Array<const float, nb::ndim<1>>& v) {
    vectors.push_back(v);
    return v.data();
  }
};

using OptionalVector = std::optional<Array<const float, nb::ndim<1>>>;


using Integers = std::vector<int64_t>;  // from lists, which are converted faster than small tensors
constexpr size_t kSpanFields = 5;       // first row, rows, computed, masked, where its table begins

using OptionalRows = std::optional<Array<const float, nb::ndim<2>>>;
using Ancestors = std::optional<Array<const uint8_t, nb::ndim<1>>>;
using Pool = std::optional<nb::ndarray<nb::device::cpu, nb::c_contig>>;

// A pass over rows and pages, after everything in it was found to be there. What it points to is the arguments'.
Input checked_input(const PyProgram& self, int64_t rows, const OptionalRows& hidden, const Integers& ids,
                    const Integers& positions, const Integers& slots, const Integers& spans, const Integers& tables,
                    const Ancestors& ancestors, const Pool& pool, int pool_kind, const Integers& picked) {
  Input input{};
  input.rows = rows;
  require(!pool || pool->ndim() == 6, "a pool has six dimensions");
  const int64_t num_blocks = pool ? (int64_t)pool->shape(2) : 0, block_size = pool ? (int64_t)pool->shape(3) : 1;
  auto within = [](const Integers& x, int64_t limit) {
    return std::all_of(x.begin(), x.end(), [&](int64_t i) { return i >= 0 && i < limit; });
  };
  auto checked = [&](const Integers& x, int64_t limit, bool is_needed) {
    require((int64_t)x.size() == rows || (x.empty() && !is_needed), "as many ids, positions and slots as rows");
    require(within(x, limit), "an id, position or slot is out of range");
    return x.data();
  };
  input.ids = checked(ids, self.num_ids, self.num_ids > 0);
  input.positions = checked(positions, INT64_MAX, self.program.has_angles());
  input.slots = checked(slots, num_blocks * block_size, self.program.has_attention());
  require(within(tables, num_blocks), "a table names a block that is not there");
  require(within(picked, rows), "a picked row is not there");
  input.picked = picked.data();
  input.picked_rows = (int64_t)picked.size();
  if (hidden) {
    require((int64_t)hidden->shape(0) == rows, "as many hidden states as rows");
    input.hidden = hidden->data();
  }
  const uint8_t *seen = ancestors ? ancestors->data() : nullptr, *end = ancestors ? seen + ancestors->size() : nullptr;
  require(spans.size() % kSpanFields == 0, "a span has five fields");
  for (const int64_t* s = spans.data(); s < spans.data() + spans.size(); s += kSpanFields) {
    require(s[0] >= 0 && s[1] > 0 && s[0] + s[1] <= rows, "a span lies outside the batch");
    const int64_t blocks = (s[2] + s[1] + block_size - 1) / block_size;
    require(s[2] >= 0 && s[3] >= 0 && s[4] >= 0, "a span begins below zero");
    require(s[4] + blocks <= (int64_t)tables.size(), "a table is shorter than its sequence");
    require(s[3] <= (end - seen) / s[1], "too few ancestors");
    input.spans.push_back({s[0], s[1], s[2], s[3], seen, tables.data() + s[4]});
    seen += s[1] * s[3];
  }
  if (pool) {
    input.pages = {nullptr, nullptr, (Narrow)pool_kind, block_size, (int64_t)pool->shape(4), (int64_t)pool->shape(5)};
    input.layer_bytes = (int64_t)(pool->nbytes() / pool->shape(0) / 2);
    input.pool = (uint8_t*)pool->data();
  }
  return input;
}

void run(PyProgram& self, int64_t rows, const OptionalRows& hidden, std::vector<Floats> outputs, const Integers& ids,
         const Integers& positions, const Integers& slots, const Integers& spans, const Integers& tables,
         const Ancestors& ancestors, const Pool& pool, int pool_kind, const Integers& picked) {
  const Input input = checked_input(self, rows, hidden, ids, positions, slots, spans, tables, ancestors, pool, pool_kind,
                                    picked);
  std::vector<float*> to;
  require(outputs.size() == self.program.num_outputs(), "as many outputs as the program has");
  for (size_t i = 0; i < outputs.size(); ++i) {
    require((int64_t)outputs[i].shape(0) == self.program.output_rows(i, input), "an output has another number of rows");
    require((int64_t)outputs[i].shape(1) == self.program.output_width(i), "an output has another width");
    to.push_back(outputs[i].data());
  }
  const std::shared_ptr<Team> team = machine().team;
  const Kernels& kernels = *machine().kernels;
  nb::gil_scoped_release release;
  self.program.run(*team, kernels, input, to);
}

// A head's greedy chains; arguments as in `run`, but for ancestors, which the first pass has none of.
std::vector<Integers> chains(PyProgram& self, int64_t rows, const OptionalRows& hidden, const Integers& lengths,
                             const Longs& tokens, const Integers& ids, const Integers& positions, const Integers& slots,
                             const Integers& spans, const Integers& tables, const Pool& pool, int pool_kind,
                             const Integers& picked) {
  const Input input = checked_input(self, rows, hidden, ids, positions, slots, spans, tables, {}, pool, pool_kind, picked);
  const int64_t num_tokens = (int64_t)tokens.size();
  require(hidden && pool && self.program.num_outputs() == 2, "a head takes features and pages, and makes features and logits");
  require(self.program.output_width(0) == (int64_t)hidden->shape(1), "features have another width than those that come in");
  require(num_tokens > 0 && num_tokens <= self.program.output_width(1), "every token has a column");
  require(std::all_of(tokens.data(), tokens.data() + num_tokens, [&](int64_t id) { return id >= 0 && id < self.num_ids; }),
          "a token has no embedding");
  require(picked.size() == lengths.size() && input.spans.size() == lengths.size(), "as many lengths as spans and picked rows");
  for (size_t i = 0; i < lengths.size(); ++i) {
    const AttentionSpan& span = input.spans[i];
    require(picked[i] == span.first_row + span.num_rows - 1, "a span's last row is the one that is picked");
    const int64_t keys = span.num_computed + span.num_rows + lengths[i] - 1;
    const int64_t* end = i + 1 < lengths.size() ? input.spans[i + 1].table : tables.data() + tables.size();
    require(lengths[i] > 0 && keys <= (end - span.table) * input.pages.block_size, "a table is shorter than its chain");
  }
  const std::shared_ptr<Team> team = machine().team;
  const Kernels& kernels = *machine().kernels;
  nb::gil_scoped_release release;
  return draft_chains(self.program, *team, kernels, input, lengths, tokens.data(), num_tokens);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native kernels of Slipstream.";
  m.def("isas", &isas, "Instruction sets of this machine, best first.");
  m.def("isa", [] { return std::string(machine().kernels->name); }, "The one in use.");
  m.def("use_isa", &use_isa);
  m.def("use_threads", &use_threads);
  m.def("num_threads", [] { return machine().team->size(); });
  m.def("packed_bytes", [](int format, int64_t rows, int64_t columns) { return packed_bytes((Format)format, rows, columns); });
  m.def("use_large_pages", [](RawBytes data) { use_large_pages(data.data(), (int64_t)data.size()); });
  m.def("pack", &pack_rows);
  m.def("unpack", &unpack_rows);
  m.def("race", &race_rows, nb::arg("scores"), nb::arg("temperature"), nb::arg("noise"), nb::arg("tokens"),
        "False if a row of scores cannot be sampled.");
  m.def("uniforms", &uniform_rows, nb::arg("noise"), nb::arg("out"));

  nb::class_<PyProgram>(m, "Program")
      .def(nb::init<>())
      .def("buffer", [](PyProgram& p, int64_t width, bool is_picked) { return p.program.buffer(width, is_picked); })
      .def("codes", [](PyProgram& p, int64_t columns) { return p.program.codes(columns); })
      .def("angles", [](PyProgram& p, std::vector<float> frequencies) { return p.program.angles(std::move(frequencies)); })
      .def("embed", [](PyProgram& p, PartTuple table, int64_t columns, ViewTuple out) {
        p.num_ids = std::get<2>(table);
        p.program.embed(p.keep(table, columns), columns, view(out));
      })
      .def("load", [](PyProgram& p, int64_t width, ViewTuple out) { p.program.load(width, view(out)); })
      .def("scale", [](PyProgram& p, ViewTuple in, float factor, int64_t width, ViewTuple out) {
        p.program.scale(view(in), factor, width, view(out));
      })
      .def("rms_norm", [](PyProgram& p, ViewTuple in, Array<const float, nb::ndim<1>> weight, float eps, int64_t width,
                          int64_t heads, ViewTuple out, int out_codes) {
        p.program.rms_norm(view(in), p.keep(weight), eps, width, heads, view(out), out_codes);
      })
      .def("quantize", [](PyProgram& p, ViewTuple in, int out_codes) { p.program.quantize(view(in), out_codes); })
      .def("linear", [](PyProgram& p, std::vector<PartTuple> parts, int64_t columns, ViewTuple in, int codes, ViewTuple out,
                        OptionalVector bias, ViewTuple residual, int gate, int out_codes) {
        LinearOp op;
        for (auto& each : parts) op.parts.push_back(p.keep(each, columns));
        op.columns = columns;
        op.in = view(in);
        op.codes = codes;
        op.out = view(out);
        op.bias = bias ? p.keep(*bias) : nullptr;
        op.residual = view(residual);
        op.gate = (LinearOp::Gate)gate;
        op.out_codes = out_codes;
        p.program.linear(std::move(op));
      }, nb::arg("parts"), nb::arg("columns"), nb::arg("in"), nb::arg("codes"), nb::arg("out"), nb::arg("bias").none(),
         nb::arg("residual"), nb::arg("gate"), nb::arg("out_codes"))
      .def("rotate", [](PyProgram& p, ViewTuple in, int angles, int64_t heads, int64_t head_dim, ViewTuple out) {
        p.program.rotate(view(in), angles, heads, head_dim, view(out));
      })
      .def("attend", [](PyProgram& p, int64_t layer, ViewTuple q, ViewTuple k, ViewTuple v, int64_t heads, float scale,
                        int64_t window, ViewTuple out, int out_codes) {
        p.program.attend(layer, view(q), view(k), view(v), heads, scale, window, view(out), out_codes);
      })
      .def("gated", [](PyProgram& p, ViewTuple in, int64_t width, bool gelu, ViewTuple out) {
        p.program.gated(view(in), width, gelu, view(out));
      })
      .def("add", [](PyProgram& p, ViewTuple a, ViewTuple b, int64_t width, ViewTuple out) {
        p.program.add(view(a), view(b), width, view(out));
      })
      .def("pick", [](PyProgram& p, ViewTuple in, int64_t width, ViewTuple out) {
        p.program.pick(view(in), width, view(out));
      })
      .def("output", [](PyProgram& p, int buffer) { p.program.output(buffer); })
      .def("run", &run, nb::arg("rows"), nb::arg("hidden").none(), nb::arg("outputs"), nb::arg("ids") = Integers(),
           nb::arg("positions") = Integers(), nb::arg("slots") = Integers(), nb::arg("spans") = Integers(),
           nb::arg("tables") = Integers(), nb::arg("ancestors").none() = nb::none(), nb::arg("pool").none() = nb::none(),
           nb::arg("pool_kind") = 0, nb::arg("picked") = Integers())
      .def("chains", &chains, nb::arg("rows"), nb::arg("hidden"), nb::arg("lengths"), nb::arg("tokens"), nb::arg("ids"),
           nb::arg("positions"), nb::arg("slots"), nb::arg("spans"), nb::arg("tables"), nb::arg("pool"),
           nb::arg("pool_kind"), nb::arg("picked"));
}
