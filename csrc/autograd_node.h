// SPDX-License-Identifier: BSD-3-Clause Autograd's node of attention for callers whom nobody
// watches. In Python it costs the host 20 to 40 us more a backward, because the engine's thread
// then runs an interpreter; in a stack that is every layer's.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/profiler/api.h>

#include <string>

#include "problem.h"

namespace dualkv {

// kForward(q, k, v, k_decoded, v_decoded, sinks, nodes, options) gives O and LSE; kBackward(dout,
// dlse, q, k, v, k_decoded, v_decoded, out, lse, nodes, options) the gradients of queries, keys and
// values.
template <auto kForward, auto kBackward>
struct AttentionNode : torch::autograd::Function<AttentionNode<kForward, kBackward>> {
  using Context = torch::autograd::AutogradContext;
  using Variables = torch::autograd::variable_list;
  using Optional = std::optional<Tensor>;

  static Variables forward(Context* context, const Tensor& q, const Tensor& k, const Tensor& v,
                           const Optional& k_decoded, const Optional& v_decoded, const Optional& sinks,
                           const Tensor& nodes, const Options& options) {
    const auto [out, lse] = kForward(q, k, v, k_decoded, v_decoded, sinks, nodes, options);
    // A result that nobody used gets no gradient of zeros.
    context->set_materialize_grads(false);
    context->save_for_backward({q, k, v, k_decoded.value_or(Tensor()), v_decoded.value_or(Tensor()),
                                sinks.value_or(Tensor()), nodes, out, lse});
    context->saved_data["softmax_scale"] = options.softmax_scale;
    context->saved_data["causal"] = options.causal;
    context->saved_data["window_left"] = options.window_left;
    context->saved_data["softcap"] = options.softcap;
    context->saved_data["mean_keys"] = options.mean_keys;
    context->saved_data["deterministic"] = options.deterministic;
    return {out, lse};
  }

  static Variables backward(Context* context, Variables gradients) {
    const Variables saved = context->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &sinks = saved[5], &nodes = saved[6];
    const Tensor &out = saved[7], &lse = saved[8];
    const Optional k_decoded = if_defined(saved[3]), v_decoded = if_defined(saved[4]);
    const Tensor dout = gradients[0].defined() ? gradients[0] : at::zeros_like(out);
    const Optional dlse = if_defined(gradients[1]);
    Options options{context->saved_data["softmax_scale"].toDouble(), context->saved_data["causal"].toBool(),
                    context->saved_data["window_left"].toInt(),      context->saved_data["softcap"].toDouble(),
                    context->saved_data["mean_keys"].toInt(),        context->saved_data["deterministic"].toBool()};

    std::vector<Tensor> found;
    if (is_watched(dout)) {
      static const c10::OperatorHandle call =
          c10::Dispatcher::singleton().findSchemaOrThrow("flash_attn_dualkv::backward", "");
      constexpr int64_t window_right = -1;
      constexpr bool in_reference = false;
      torch::jit::Stack stack{dout, dlse, q, k, v, k_decoded, v_decoded, out, lse, nodes, options.softmax_scale,
                              options.causal, options.window_left, window_right, options.softcap, in_reference,
                              options.mean_keys, options.deterministic};
      call.callBoxed(stack);
      found = stack[0].toTensorVector();
    } else {
      options.deterministic |= wants_determinism();
      found = kBackward(dout, dlse, q, k, v, k_decoded, v_decoded, out, lse, nodes, options);
    }
    Variables result(8);  // one of every argument of `forward`
    int input = 0;        // among those that are tensors, by which autograd asks
    for (int i = 0; i < 5 && i < static_cast<int>(found.size()); ++i, ++input) {
      if (context->needs_input_grad(input)) result[i] = found[i];
    }
    if (sinks.defined() && context->needs_input_grad(input)) result[5] = sink_gradient(dout, dlse, out, lse, sinks);
    return result;
  }

 private:
  static Optional if_defined(const Tensor& t) { return t.defined() ? Optional(t) : std::nullopt; }

  // (heads): of each row, its sink's probability times 0 - delta, since a sink's value is 0.
  static Tensor sink_gradient(const Tensor& dout, const Optional& dlse, const Tensor& out, const Tensor& lse,
                              const Tensor& sinks) {
    Tensor delta = (dout.to(at::kFloat) * out).sum(-1).transpose(0, 1);
    if (dlse) delta = delta - *dlse;
    const Tensor probability = (sinks.to(at::kFloat).unsqueeze(1) - lse).exp();
    // A row of no node has the LSE -inf: whatever its upstream gradient, it has no sink.
    const Tensor rows = (probability * delta).masked_fill(lse == -std::numeric_limits<float>::infinity(), 0.0);
    return rows.sum(1).neg().to(sinks.scalar_type());
  }

  // Whether somebody may want to see the backward as an operator: as ops.is_watched, and under
  // create_graph=True, where the operator refuses to be differentiated again.
  static bool is_watched(const Tensor& dout) {
    return at::GradMode::is_enabled() || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
           dout.key_set().has(c10::DispatchKey::Python) ||
           c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
           torch::profiler::impl::profilerEnabled();
  }

  // As ops.is_deterministic, at the time of the backward. The forward has refused what is no
  // spelling of a bool.
  static bool wants_determinism() {
    if (at::globalContext().deterministicAlgorithms()) return true;
    const char* text = std::getenv("FLASH_ATTENTION_DETERMINISTIC");
    std::string wanted(text ? text : "");
    for (char& letter : wanted) letter = std::tolower(static_cast<unsigned char>(letter));
    return wanted == "1" || wanted == "true" || wanted == "yes" || wanted == "on";
  }
};

}  // namespace dualkv
