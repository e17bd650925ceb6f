// SPDX-License-Identifier: BSD-3-Clause
// The Python module together with a kernel library that computes nothing: launch_counts() tells the
// numbers of its last call.
#include "module.cpp"

#include <sstream>

namespace {

std::string& noted() {
  static std::string text;
  return text;
}

class Notes {
 public:
  template <typename T>
  Notes& add(const std::string& name, T value) {
    text_ << name << '\t' << (int64_t)value << '\n';
    return *this;
  }
  Notes& add(const std::string& name, const DualkvTensor& one) {
    add(name, one.data).add(name + ".rows", one.rows).add(name + ".heads", one.heads).add(name + ".width", one.head_dim);
    return add(name + ".row_stride", one.row_stride).add(name + ".head_stride", one.head_stride);
  }
  Notes& add(const DualkvCall& call) {
    add("device", call.device).add("stream", call.stream).add("is_half", call.is_half);
    add("q", call.q).add("k", call.k).add("v", call.v).add("k_decoded", call.k_decoded);
    add("v_decoded", call.v_decoded).add("nodes", call.nodes).add("num_nodes", call.num_nodes);
    const DualkvOptions& options = call.options;
    add("1000 softmax_scale", 1000 * options.softmax_scale).add("1000 softcap", 1000 * options.softcap);
    add("window_left", options.window_left).add("mean_keys", options.mean_keys);
    return add("causal", options.causal).add("deterministic", options.deterministic);
  }
  int keep() {
    noted() = text_.str();
    return DUALKV_SUCCESS;
  }

 private:
  std::ostringstream text_;
};

}  // namespace

int dualkv_forward_scratch(const DualkvCall*, int64_t* bytes) { return *bytes = 256, DUALKV_SUCCESS; }
int dualkv_backward_scratch(const DualkvCall*, int64_t* bytes) { return *bytes = 512, DUALKV_SUCCESS; }
int dualkv_forward(const DualkvCall* call, const DualkvForward* tensors, void* scratch) {
  Notes notes;
  notes.add(*call).add("out", tensors->out).add("lse", tensors->lse).add("sinks", tensors->sinks);
  return notes.add("scratch", scratch).keep();
}
int dualkv_backward(const DualkvCall* call, const DualkvBackward* tensors, void* scratch) {
  Notes notes;
  notes.add(*call).add("dout", tensors->dout).add("out", tensors->out).add("lse", tensors->lse);
  notes.add("dlse", tensors->dlse).add("dq", tensors->dq).add("dk", tensors->dk).add("dv", tensors->dv);
  notes.add("dk_decoded", tensors->dk_decoded).add("dv_decoded", tensors->dv_decoded);
  return notes.add("scratch", scratch).keep();
}
int dualkv_sequence_nodes(int32_t, void*, const int32_t*, const int32_t*, const int32_t*, const int32_t*, int64_t,
                          int64_t, int64_t, int32_t*) {
  return DUALKV_FAILURE;
}
int dualkv_tree_nodes(int32_t, void*, const int32_t*, const int32_t*, int64_t, int32_t*) { return DUALKV_FAILURE; }
int dualkv_decode_plan_bytes(int32_t, const DualkvDecodePlan*, int64_t*) { return DUALKV_FAILURE; }
int dualkv_decode_plan(int32_t, void*, const DualkvDecodePlan*) { return DUALKV_FAILURE; }
int dualkv_decode(int32_t, void*, const DualkvDecodePlan*, const DualkvDecode*) { return DUALKV_FAILURE; }
const char* dualkv_error(void) { return "not here"; }
const char* dualkv_version(void) { return ""; }
int dualkv_explain_plan(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const DualkvOptions*, int32_t,
                        const char*, const char**) {
  return DUALKV_FAILURE;
}
const char* dualkv_build_info(void) { return ""; }
const char* dualkv_launch_counts(void) { return noted().c_str(); }
