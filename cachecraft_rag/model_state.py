"""Notices what changes a model's activations from outside: weights, adapters, soft prompts, hooks.

Stored KV is only right for the weights that made it, so every request asks here first. Hashing all weights takes
seconds; a signature that is cheap to take tells when it must be done again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.modules.module as torch_modules

from cachecraft_rag.capability import LENGTH_DEPENDENT_ROPE_KINDS, rope_kinds
from cachecraft_rag.keys import model_fingerprint

_SAMPLES = 16  # per tensor; a grid of 3 elements per dimension where a tensor has gaps in memory
_SAMPLES_PER_DIMENSION = 3
# What PEFT keeps beside tensors and yet computes with: plain numbers, by name of the adapter.
_OF_AN_ADAPTER = ("merged_adapters", "scaling", "use_dora", "use_rslora")


class ModelState:
    """Watches one model.

    Args:
        model: A transformers model, possibly wrapped by PEFT.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        # By the length of the prompt, in every forward pass; the configuration says how.
        self._rewrites_frequencies = bool(rope_kinds(model.config.get_text_config()) & LENGTH_DEPENDENT_ROPE_KINDS)
        self._signature: object = None
        self._fingerprint = ""

    def fingerprint(self) -> str:
        """The model's fingerprint now; computed again only when the signature has changed."""
        signature = self._take_signature()
        if signature != self._signature:
            config = self._model.config.to_dict()
            self._fingerprint = model_fingerprint(config, self._tensors(), self._adapters())
            self._signature = signature
        return self._fingerprint

    def soft_prompted(self) -> Any | None:
        """The model with its soft prompt (PEFT prompt learning), when one is active."""
        peft = getattr(self._model, "active_peft_config", None)
        return self._model if getattr(peft, "is_prompt_learning", False) else None

    def intervention(self) -> str | None:
        """Why nothing may be stored or reused just now; ``None`` when the model runs undisturbed."""
        if self.soft_prompted() is not None:
            return "a soft prompt (PEFT prompt learning) is active"
        if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
            return "a forward hook on every module of the process may change activations"
        for name, module in self._model.named_modules():
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                    return f"a forward hook on {name or 'the model'} may change activations"
        if any(tensor.device.type == "meta" for _, tensor in self._tensors()):
            return "weights are offloaded, so they can't be identified"
        return None

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        buffers = list(self._model.named_buffers())
        if self._rewrites_frequencies:
            buffers = [(name, buffer) for name, buffer in buffers if not name.endswith("inv_freq")]
        return [*self._model.named_parameters(), *buffers]

    def _adapters(self) -> str:
        """Which adapters are switched on and how strongly, layer by layer (PEFT's attributes; empty without any)."""
        states = []
        for name, module in self._model.named_modules():
            if hasattr(module, "active_adapters") and hasattr(module, "disable_adapters"):
                active, disabled = module.active_adapters, module.disable_adapters
                if not callable(active):
                    others = (getattr(module, attribute, None) for attribute in _OF_AN_ADAPTER)
                    states.append(":".join(map(str, (name, active, disabled, *others))))
        return ";".join(states)

    @torch.inference_mode()
    def _take_signature(self) -> object:
        """Identity, version and a few elements of every tensor: changes whenever an optimiser or a merge writes."""
        identities: list[object] = []
        samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for _, tensor in self._tensors():
            version = 0 if tensor.is_inference() else tensor._version
            identities.append((tensor.data_ptr(), version, tuple(tensor.shape), tensor.dtype))
            if tensor.device.type != "meta" and tensor.numel():
                samples.setdefault((tensor.device, tensor.dtype), []).append(_sample(tensor))
        sampled = [torch.cat(parts).float().cpu().numpy().tobytes() for parts in samples.values()]  # one copy each
        return identities, sampled, self._adapters()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements from all over a tensor, ``[n]``."""
    if not tensor.is_contiguous():
        grid = tuple(slice(None, None, max(1, size // _SAMPLES_PER_DIMENSION)) for size in tensor.shape)
        return tensor[grid].reshape(-1)
    num_samples = min(_SAMPLES, tensor.numel())
    step = (tensor.numel() - 1) // max(1, num_samples - 1)  # no multiple of a row's length, but for luck
    return tensor.as_strided((num_samples,), (step,))
