// SPDX-License-Identifier: BSD-3-Clause
// The Python module: reads tensors and hands them over to the kernel library, which it opens when
// asked to. It sees neither torch nor CUDA: it asks tensors by their Python methods, so that one
// file serves every PyTorch.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "api.h"

namespace py = pybind11;

namespace {

#define DUALKV_EVERY_FUNCTION(use)                                                            \
  use(forward_scratch) use(backward_scratch) use(forward) use(backward) use(sequence_nodes)   \
  use(tree_nodes) use(decode_plan_bytes) use(decode_plan) use(decode) use(score_rows)         \
  use(score_rows_gradient) use(error) use(version) use(explain_plan) use(build_info)          \
  use(launch_counts)

// Functions of the library that is open. It stays so: kernels may run until the process ends.
struct Library {
#define DUALKV_DECLARE(name) decltype(&dualkv_##name) name = nullptr;
  DUALKV_EVERY_FUNCTION(DUALKV_DECLARE)
} library;

// Returns the version of the package that the library was built with.
std::string open_library(const std::string& path) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw py::import_error(dlerror());
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    if (!function) throw py::import_error(path + " has no " + name);
  };
#define DUALKV_FIND(name) find(library.name, "dualkv_" #name);
  DUALKV_EVERY_FUNCTION(DUALKV_FIND)
  return library.version();
}

void check(int status) {
  if (status == DUALKV_SUCCESS) return;
  const std::string text = library.error();
  if (status == DUALKV_INVALID_VALUE) throw py::value_error(text);
  throw std::runtime_error(text);
}

template <typename T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Items of a tuple. pybind11's general casters take five times as long, and a call has 60 numbers.
PyObject* item(py::handle tuple, int index) { return PyTuple_GET_ITEM(tuple.ptr(), index); }
int64_t integer(py::handle tuple, int index) { return PyLong_AsLongLong(item(tuple, index)); }

void check_length(py::handle tuple, int length) {
  if (PyTuple_Check(tuple.ptr()) && PyTuple_GET_SIZE(tuple.ptr()) == length) return;
  throw py::type_error("expected a tuple of " + std::to_string(length));
}
void check_numbers() {
  if (PyErr_Occurred()) throw py::error_already_set();
}
py::object checked(PyObject* made) {
  if (!made) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// What a tensor says of itself, by PyTorch's names, which are made once.
PyObject* named(const char* name) { return PyUnicode_InternFromString(name); }
py::object asked(py::handle tensor, PyObject* method) {
  return checked(PyObject_CallMethodNoArgs(tensor.ptr(), method));
}

int64_t address_of(py::handle tensor) {  // or of a storage; 0 for None
  static PyObject* const data_ptr = named("data_ptr");
  if (tensor.is_none()) return 0;
  const int64_t address = PyLong_AsLongLong(asked(tensor, data_ptr).ptr());
  check_numbers();
  return address;
}
py::object shape_of(py::handle tensor) {
  static PyObject* const shape = named("shape");
  return checked(PyObject_GetAttr(tensor.ptr(), shape));
}

DualkvTensor contiguous(int64_t address, int64_t rows, int64_t heads, int64_t head_dim) {
  return {pointer<void>(address), rows, heads, head_dim, heads * head_dim, head_dim};
}

// Reads tensors (rows, heads, head_dim). Those that kernels cannot read are copied: copies move 16
// bytes, and tensor maps know no stride of zero, so rows must begin on 16 bytes, and expanded
// dimensions must be real.
class Reader {
 public:
  explicit Reader(py::handle copy) : copy_(copy) {}

  DualkvTensor read(py::handle tensor) {
    if (tensor.is_none()) return {};
    static PyObject* const stride = named("stride");
    const py::object shape = shape_of(tensor), strides = asked(tensor, stride);
    check_length(shape, 3), check_length(strides, 3);
    const int64_t address = address_of(tensor), rows = integer(shape, 0), heads = integer(shape, 1),
                  head_dim = integer(shape, 2), row = integer(strides, 0), head = integer(strides, 1);
    const bool is_good = address % 16 == 0 && (rows == 1 || (row > 0 && row % 8 == 0)) &&
                         (heads == 1 || (head > 0 && head % 8 == 0)) && integer(strides, 2) == 1;
    if (is_good || rows == 0) return {pointer<void>(address), rows, heads, head_dim, row, head};
    copies_.push_back(copy_(tensor));
    return contiguous(address_of(copies_.back()), rows, heads, head_dim);
  }

 private:
  py::handle copy_;
  std::vector<py::object> copies_;
};

// `Options` of calls.py, by the order of its fields.
DualkvOptions options_of(py::handle given, bool deterministic) {
  check_length(given, 7);
  return {PyFloat_AsDouble(item(given, 0)), PyFloat_AsDouble(item(given, 3)), integer(given, 2), integer(given, 5),
          item(given, 1) == Py_True,        deterministic};
}

// A call of either direction, and what it keeps until the launch. `given`: device, stream, whether
// float16, the five inputs, nodes, options, whether deterministic.
struct Launch {
  Launch(py::handle given, py::handle copy) : reader(copy) {
    check_length(given, 7);
    inputs = item(given, 3);
    check_length(inputs, 5);
    const py::handle nodes = item(given, 4);
    call = {static_cast<int32_t>(integer(given, 0)), item(given, 2) == Py_True, pointer<void>(integer(given, 1)),
            input(0), input(1), input(2), input(3), input(4), pointer<const int32_t>(address_of(nodes)),
            integer(shape_of(nodes), 0), options_of(item(given, 5), item(given, 6) == Py_True)};
    check_numbers();
  }

  // Whether nobody sees a key.
  bool is_empty() const { return call.num_nodes == 0 || call.q.rows == 0 || call.k.rows + call.k_decoded.rows == 0; }

  // Scratch memory, which belongs to what `allocate` makes of its size.
  void* scratch(decltype(&dualkv_forward_scratch) size_of, py::handle allocate) {
    int64_t bytes = 0;
    check(size_of(&call, &bytes));
    memory = allocate(bytes, py::handle(item(inputs, 0)));
    return pointer<void>(address_of(memory));
  }

  DualkvCall call;
  Reader reader;

 private:
  DualkvTensor input(int index) { return reader.read(item(inputs, index)); }

  py::handle inputs;
  py::object memory;
};

// Both return whether there was something to launch.
bool forward(py::handle given, py::handle copy, py::handle allocate, py::handle out, py::handle lse, py::handle sinks) {
  Launch launch(given, copy);
  const DualkvCall& call = launch.call;
  if (launch.is_empty()) return false;
  const DualkvForward tensors{contiguous(address_of(out), call.q.rows, call.q.heads, call.v.head_dim),
                              pointer<float>(address_of(lse)), pointer<const float>(address_of(sinks))};
  check(library.forward(&call, &tensors, launch.scratch(library.forward_scratch, allocate)));
  return true;
}

// `gradients`: of the inputs that there are. `sinks`, `dsinks`: both None where nobody asks.
bool backward(py::handle given, py::handle copy, py::handle allocate, py::handle dout, py::handle out, py::handle lse,
              py::handle dlse, const py::list& gradients, py::handle sinks, py::handle dsinks) {
  Launch launch(given, copy);
  const DualkvCall& call = launch.call;
  if (launch.is_empty()) return false;
  const auto like = [&](const DualkvTensor& input, size_t index) {
    const int64_t address = index < gradients.size() ? address_of(gradients[index]) : 0;
    return contiguous(address, input.rows, input.heads, input.head_dim);
  };
  const DualkvBackward tensors{launch.reader.read(dout), launch.reader.read(out), pointer<const float>(address_of(lse)),
                               pointer<const float>(address_of(dlse)), like(call.q, 0), like(call.k, 1),
                               like(call.v, 2), like(call.k_decoded, 3), like(call.v_decoded, 4),
                               pointer<const float>(address_of(sinks)), pointer<float>(address_of(dsinks))};
  check(library.backward(&call, &tensors, launch.scratch(library.backward_scratch, allocate)));
  return true;
}

void sequence_nodes(int device, int64_t stream, py::handle offsets, int64_t num_sequences, int64_t num_groups,
                    int64_t context_rows, int64_t nodes) {
  check_length(offsets, 4);
  const auto at = [&](int index) { return pointer<const int32_t>(integer(offsets, index)); };
  check(library.sequence_nodes(device, pointer<void>(stream), at(0), at(1), at(2), at(3), num_sequences, num_groups,
                               context_rows, pointer<int32_t>(nodes)));
}

void tree_nodes(int device, int64_t stream, int64_t cu_seqlens, int64_t parents, int64_t num_nodes, int64_t nodes) {
  check(library.tree_nodes(device, pointer<void>(stream), pointer<const int32_t>(cu_seqlens),
                           pointer<const int32_t>(parents), num_nodes, pointer<int32_t>(nodes)));
}

// The fields of DualkvDecodePlan in their order: those of a step, then those that stay.
DualkvDecodePlan decode_plan_of(py::handle given) {
  check_length(given, 21);
  const auto at = [&](int index) { return integer(given, index); };
  const auto pointer_at = [&](int index) { return pointer<const int32_t>(at(index)); };
  const DualkvDecodePlan plan{pointer_at(0), at(1),         at(2),  at(3),         at(4),
                              pointer_at(5), pointer_at(6), pointer_at(7), pointer_at(8), pointer_at(9),
                              at(10),        at(11),        at(12), at(13),        at(14),
                              at(15),        at(16),        at(17), at(18),        at(19),
                              pointer<void>(at(20))};
  check_numbers();
  return plan;
}

int64_t decode_plan_bytes(int device, py::handle given) {
  const DualkvDecodePlan plan = decode_plan_of(given);
  int64_t bytes = 0;
  check(library.decode_plan_bytes(device, &plan, &bytes));
  return bytes;
}

void decode_plan(int device, int64_t stream, py::handle given) {
  const DualkvDecodePlan plan = decode_plan_of(given);
  check(library.decode_plan(device, pointer<void>(stream), &plan));
}

// A cache (pages, rows, heads, head_dim), in place.
DualkvPages pages_of(py::handle cache) {
  static PyObject* const stride = named("stride");
  const py::object strides = asked(cache, stride);
  check_length(strides, 4);
  return {pointer<const void>(address_of(cache)), integer(strides, 0), integer(strides, 1), integer(strides, 2)};
}

void decode(int device, int64_t stream, py::handle plan, py::handle copy, py::handle q, py::handle out, py::handle k,
            py::handle v, py::handle lse, py::handle sinks, bool is_half, py::handle options) {
  Reader reader(copy);
  const DualkvDecodePlan planned = decode_plan_of(plan);
  const DualkvDecode call{reader.read(q), reader.read(out), pages_of(k), pages_of(v), pointer<float>(address_of(lse)),
                          pointer<const float>(address_of(sinks)), is_half, options_of(options, false)};
  check_numbers();
  check(library.decode(device, pointer<void>(stream), &planned, &call));
}

// The fields of DualkvLogits in their order.
DualkvLogits logits_of(py::handle given) {
  check_length(given, 7);
  const auto at = [&](int index) { return integer(given, index); };
  const DualkvLogits logits{pointer<const void>(at(0)), at(1), at(2), at(3), static_cast<int32_t>(at(4)),
                            pointer<const int64_t>(at(5)), PyFloat_AsDouble(item(given, 6))};
  check_numbers();
  return logits;
}

void score_rows(int device, int64_t stream, py::handle logits, int64_t normalizer, int64_t chosen, int64_t entropy,
                double elsewhere) {
  const DualkvLogits rows = logits_of(logits);
  const DualkvScores scores{pointer<float>(normalizer), pointer<float>(chosen), pointer<float>(entropy), elsewhere};
  check(library.score_rows(device, pointer<void>(stream), &rows, &scores));
}

void score_rows_gradient(int device, int64_t stream, py::handle logits, int64_t normalizer, int64_t d_logps,
                         int64_t entropy, int64_t d_entropy, int64_t d_logits) {
  const DualkvLogits rows = logits_of(logits);
  const DualkvScoreGradient gradient{pointer<const float>(normalizer), pointer<const float>(d_logps),
                                     pointer<const float>(entropy), pointer<const float>(d_entropy),
                                     pointer<void>(d_logits)};
  check(library.score_rows_gradient(device, pointer<void>(stream), &rows, &gradient));
}

std::string explain_plan(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t head_dim_v, int64_t rows,
                         int64_t num_nodes, py::handle options, bool deterministic, int device,
                         const std::optional<std::string>& gpu) {
  const DualkvOptions asked = options_of(options, deterministic);
  const char* text = nullptr;
  check(library.explain_plan(num_heads, num_kv_heads, head_dim, head_dim_v, rows, num_nodes, &asked, device,
                             gpu ? gpu->c_str() : nullptr, &text));
  return text;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The way to the kernel library of flash_attn_dualkv";
  m.def("open_library", &open_library);
  m.def("forward", &forward);
  m.def("backward", &backward);
  m.def("sequence_nodes", &sequence_nodes);
  m.def("tree_nodes", &tree_nodes);
  m.def("decode_plan_bytes", &decode_plan_bytes);
  m.def("decode_plan", &decode_plan);
  m.def("decode", &decode);
  m.def("score_rows", &score_rows);
  m.def("score_rows_gradient", &score_rows_gradient);
  m.def("explain_plan", &explain_plan);
  m.def("build_info", [] { return std::string(library.build_info()); });
  m.def("launch_counts", [] { return std::string(library.launch_counts()); });
}
