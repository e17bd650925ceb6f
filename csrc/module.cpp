// SPDX-License-Identifier: BSD-3-Clause
// The Python module: hands tuples of numbers over to the kernel library, which it opens when asked
// to. It sees neither torch nor CUDA, so that one file serves every PyTorch.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "api.h"

namespace py = pybind11;

namespace {

#define DUALKV_EVERY_FUNCTION(use)                                                            \
  use(forward_scratch) use(backward_scratch) use(forward) use(backward) use(sequence_nodes)   \
  use(tree_nodes) use(decode_plan_bytes) use(decode_plan) use(decode) use(error) use(version) \
  use(explain_plan) use(build_info) use(launch_counts)

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

// Address, rows, heads, head dim, row stride, head stride.
DualkvTensor tensor(py::handle view) {
  check_length(view, 6);
  return {pointer<void>(integer(view, 0)), integer(view, 1), integer(view, 2),
          integer(view, 3),                integer(view, 4), integer(view, 5)};
}

// softmax_scale, causal, window_left, softcap, mean_keys, deterministic.
DualkvOptions options_of(py::handle given) {
  check_length(given, 6);
  return {PyFloat_AsDouble(item(given, 0)), PyFloat_AsDouble(item(given, 3)), integer(given, 2), integer(given, 4),
          item(given, 1) == Py_True,        item(given, 5) == Py_True};
}

DualkvCall make_call(int device, int64_t stream, bool is_half, py::handle tensors, int64_t nodes, int64_t num_nodes,
                     py::handle options) {
  check_length(tensors, 5);
  const auto at = [&](int index) { return tensor(item(tensors, index)); };
  const DualkvCall call{device, is_half, pointer<void>(stream), at(0), at(1), at(2), at(3), at(4),
                        pointer<const int32_t>(nodes), num_nodes, options_of(options)};
  check_numbers();
  return call;
}

int64_t scratch_of(decltype(&dualkv_forward_scratch) ask, const DualkvCall& call) {
  int64_t bytes = 0;
  check(ask(&call, &bytes));
  return bytes;
}

void forward(const DualkvCall& call, int64_t scratch, py::handle out, int64_t lse, int64_t sinks) {
  const DualkvForward tensors{tensor(out), pointer<float>(lse), pointer<const float>(sinks)};
  check_numbers();
  check(library.forward(&call, &tensors, pointer<void>(scratch)));
}

void backward(const DualkvCall& call, int64_t scratch, py::handle dout, py::handle out, int64_t lse, int64_t dlse,
              py::handle gradients) {
  check_length(gradients, 5);
  const auto at = [&](int index) { return tensor(item(gradients, index)); };
  const DualkvBackward tensors{tensor(dout), tensor(out), pointer<const float>(lse), pointer<const float>(dlse),
                               at(0), at(1), at(2), at(3), at(4)};
  check_numbers();
  check(library.backward(&call, &tensors, pointer<void>(scratch)));
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
  check_length(given, 16);
  const auto at = [&](int index) { return integer(given, index); };
  const auto pointer_at = [&](int index) { return pointer<const int32_t>(at(index)); };
  const DualkvDecodePlan plan{pointer_at(0), at(1), at(2),  at(3),  at(4),  pointer_at(5), pointer_at(6), pointer_at(7),
                              at(8),         at(9), at(10), at(11), at(12), at(13),        at(14), pointer<void>(at(15))};
  check_numbers();
  return plan;
}

int64_t decode_plan_bytes(py::handle given) {
  const DualkvDecodePlan plan = decode_plan_of(given);
  int64_t bytes = 0;
  check(library.decode_plan_bytes(&plan, &bytes));
  return bytes;
}

void decode_plan(int device, int64_t stream, py::handle given) {
  const DualkvDecodePlan plan = decode_plan_of(given);
  check(library.decode_plan(device, pointer<void>(stream), &plan));
}

// Address, strides of pages, rows and heads.
DualkvPages pages(py::handle view) {
  check_length(view, 4);
  return {pointer<const void>(integer(view, 0)), integer(view, 1), integer(view, 2), integer(view, 3)};
}

void decode(int device, int64_t stream, py::handle plan, py::handle rows, py::handle caches, int64_t lse,
            int64_t sinks, bool is_half, py::handle options) {
  check_length(rows, 2);
  check_length(caches, 2);
  const DualkvDecodePlan planned = decode_plan_of(plan);
  const DualkvDecode call{tensor(item(rows, 0)), tensor(item(rows, 1)), pages(item(caches, 0)), pages(item(caches, 1)),
                          pointer<float>(lse), pointer<const float>(sinks), is_half, options_of(options)};
  check_numbers();
  check(library.decode(device, pointer<void>(stream), &planned, &call));
}

std::string explain_plan(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t head_dim_v, int64_t rows,
                         int64_t num_nodes, py::handle options, int device, const std::optional<std::string>& gpu) {
  const DualkvOptions asked = options_of(options);
  const char* text = nullptr;
  check(library.explain_plan(num_heads, num_kv_heads, head_dim, head_dim_v, rows, num_nodes, &asked, device,
                             gpu ? gpu->c_str() : nullptr, &text));
  return text;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The way to the kernel library of flash_attn_dualkv";
  py::class_<DualkvCall>(m, "Call")
      .def(py::init(&make_call))
      .def("forward_scratch", [](const DualkvCall& call) { return scratch_of(library.forward_scratch, call); })
      .def("backward_scratch", [](const DualkvCall& call) { return scratch_of(library.backward_scratch, call); })
      .def("forward", &forward)
      .def("backward", &backward);
  m.def("open_library", &open_library);
  m.def("sequence_nodes", &sequence_nodes);
  m.def("tree_nodes", &tree_nodes);
  m.def("decode_plan_bytes", &decode_plan_bytes);
  m.def("decode_plan", &decode_plan);
  m.def("decode", &decode);
  m.def("explain_plan", &explain_plan);
  m.def("build_info", [] { return std::string(library.build_info()); });
  m.def("launch_counts", [] { return std::string(library.launch_counts()); });
}
