# SPDX-License-Identifier: BSD-3-Clause
"""verl on the CPU, for tests: a platform by verl's own plug-in, and what its FSDP and Ulysses paths miss without a GPU.

VERL_USE_EXTERNAL_MODULES=cpu_platform VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda VERL_ENGINE_VENDOR=nvidia
"""

import contextlib
import gc
import os
import resource
import types
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Device(types.ModuleType):
    """What verl asks of torch.cuda: memory is the process's, the rest is done at once or means nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "memory_allocated" in name or "memory_reserved" in name:
            return lambda *args: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if name == "mem_get_info":
            return lambda *args: (1 << 33, 1 << 34)
        if name == "get_device_name":  # by which verl knows the FLOP/s that it divides by
            return lambda *args: "CPU"
        if name == "empty_cache":  # behind gc.collect(), which is then spared what lives as long as the process
            return gc.freeze
        return getattr(torch.cpu, name, lambda *args, **kwargs: None)


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None: ...


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    device_name = vendor_name = "cpu"
    device_module = _Device("cpu_device")
    set_device = synchronize = empty_cache = set_allocator_settings = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM") == "cpu"

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 0

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: Any) -> dict[str, Any]:
        return {}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


def _without_the_check_for_gpus() -> None:
    """FSDP 1 refuses to broadcast the states of modules on the CPU, which gloo can."""
    from torch.distributed.fsdp import _init_utils

    _init_utils._check_module_states_for_sync_module_states = lambda module_states: None


def _all_to_all(outputs: list[Any], inputs: list[Any], group: Any = None, async_op: bool = False) -> None:
    """gloo has none for lists."""
    every = [torch.empty_like(torch.stack(inputs)) for _ in outputs]
    torch.distributed.all_gather(every, torch.stack(inputs), group=group)
    for output, parts in zip(outputs, every):
        output.copy_(parts[torch.distributed.get_rank(group)])


def _flash_attention_2() -> None:
    """transformers' FlashAttention 2 path, which verl's Ulysses patches, on PyTorch's attention."""
    import transformers.integrations.flash_attention as integration
    import transformers.modeling_flash_attention_utils as utils
    import transformers.modeling_utils as modeling

    def forward(
        query: Any, key: Any, value: Any, attention_mask: Any, query_length: int, is_causal: bool, **options: Any
    ) -> Any:
        """(B, T, H, D); one row may hold several sequences: where position ids begin at 0, or towers' offsets say."""
        assert attention_mask is None
        begins = [0]
        if not is_causal:
            begins = options["cu_seq_lens_q"][:-1].tolist()
        elif query.shape[0] == 1:
            begins = (options["position_ids"].flatten() == 0).nonzero().flatten().tolist()
        parts = []
        for begin, end in zip(begins, [*begins[1:], query.shape[1]]):
            q, k, v = (one[:, begin:end].transpose(1, 2) for one in (query, key, value))
            window = options.get("sliding_window") or end - begin
            seen = torch.ones(end - begin, end - begin, dtype=torch.bool)
            seen = seen.tril().triu(1 - window) if is_causal else seen
            parts.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, seen, scale=options.get("softmax_scale"), enable_gqa=q.shape[1] != k.shape[1]
                ).transpose(1, 2)
            )
        return torch.cat(parts, 1)

    integration._flash_attention_forward = utils._flash_attention_forward = forward
    modeling.PreTrainedModel._flash_attn_can_dispatch = lambda self, *args, **kwargs: True
    modeling.lazy_import_flash_attention = lambda *args, **kwargs: None
    integration.flash_attn_supports_top_left_mask = lambda: False


def _without_pinned_memory() -> None:
    """Copies of activations that verl offloads."""
    from verl.utils.activation_offload import SynchronizedGroupOffloadHandler

    SynchronizedGroupOffloadHandler.offload.__defaults__ = (False,)


_without_the_check_for_gpus()
_without_pinned_memory()
torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
torch.distributed.all_to_all = _all_to_all
_flash_attention_2()
