// Autograd's node of packed attention without sinks, for callers whom nobody watches. In Python it costs the host 20
// to 40 us more a backward, because the engine's thread then runs an interpreter; in a stack that is every layer's.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/profiler/api.h>

#include <string>

#include "problem.h"

namespace dualkv {

// kForward(q, k, v, sinks, segments, groups, context_rows, softmax_scale) gives O and LSE; kBackward(dout, dlse, q, k,
// v, out, lse, segments, groups, context_rows, softmax_scale, deterministic) the gradients of q, k and v.
template <auto kForward, auto kBackward>
struct PackedNode : torch::autograd::Function<PackedNode<kForward, kBackward>> {
  using Context = torch::autograd::AutogradContext;
  using Variables = torch::autograd::variable_list;

  static Variables forward(Context* context, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& segments,
                           const Tensor& groups, int64_t context_rows, double softmax_scale, bool deterministic) {
    const auto [out, lse] = kForward(q, k, v, std::nullopt, segments, groups, context_rows, softmax_scale);
    // Of a result that nobody used, no gradient is made up.
    context->set_materialize_grads(false);
    context->save_for_backward({q, k, v, out, lse, segments, groups});
    context->saved_data["context_rows"] = context_rows;
    context->saved_data["softmax_scale"] = softmax_scale;
    context->saved_data["deterministic"] = deterministic;
    return {out, lse};
  }

  static Variables backward(Context* context, Variables gradients) {
    const Variables saved = context->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[3], &lse = saved[4];
    const Tensor &segments = saved[5], &groups = saved[6];
    const Tensor dout = gradients[0].defined() ? gradients[0] : at::zeros_like(out);
    const auto dlse = gradients[1].defined() ? std::optional<Tensor>(gradients[1]) : std::nullopt;
    const int64_t context_rows = context->saved_data["context_rows"].toInt();
    const double softmax_scale = context->saved_data["softmax_scale"].toDouble();
    const bool deterministic = context->saved_data["deterministic"].toBool();

    Variables result(8);  // one of every argument of `forward`
    if (is_watched(dout)) {
      static const c10::OperatorHandle call =
          c10::Dispatcher::singleton().findSchemaOrThrow("flash_attn_dualkv::packed_backward", "");
      // Without window and softcap, and not in the reference.
      torch::jit::Stack stack{dout,     dlse,   q,            k,
                              v,        out,    lse,          segments,
                              groups,   context_rows, softmax_scale, c10::IValue(),
                              c10::IValue(), false, deterministic};
      call.callBoxed(stack);
      for (int i = 0; i < 3; ++i) result[i] = stack[i].toTensor();
    } else {
      std::tie(result[0], result[1], result[2]) =
          kBackward(dout, dlse, q, k, v, out, lse, segments, groups, context_rows, softmax_scale,
                    deterministic || wants_determinism());
    }
    for (int i = 0; i < 3; ++i) {
      if (!context->needs_input_grad(i)) result[i] = Tensor();
    }
    return result;
  }

 private:
  // Whether somebody may want to see the backward as an operator: as ops.is_watched, and under create_graph=True, where
  // the operator refuses to be differentiated again.
  static bool is_watched(const Tensor& dout) {
    return at::GradMode::is_enabled() || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
           dout.key_set().has(c10::DispatchKey::Python) ||
           c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
           torch::profiler::impl::profilerEnabled();
  }

  // As ops.is_deterministic, at the time of the backward. The forward has refused what is no spelling of a bool.
  static bool wants_determinism() {
    if (at::globalContext().deterministicAlgorithms()) return true;
    const char* text = std::getenv("FLASH_ATTENTION_DETERMINISTIC");
    std::string wanted(text ? text : "");
    for (char& letter : wanted) letter = std::tolower(static_cast<unsigned char>(letter));
    return wanted == "1" || wanted == "true" || wanted == "yes" || wanted == "on";
  }
};

}  // namespace dualkv
