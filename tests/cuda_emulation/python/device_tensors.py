"""Tensors that say they are on a CUDA device, though their memory is the CPU's.

Python code that asks where a tensor lies takes its branches for a device, and the core runs its
emulated kernels. An operation that torch would refuse because its tensors lie on two devices is
refused here too. What makes the host wait for the device is counted, though not a copy that asks
not to, which a driver may wait for all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda:0")

waits: Counter[str] = Counter()
"""How often the host waited for the device, per operation."""

_VALUES_ON_THE_HOST = {
    "__bool__",
    "__contains__",
    "__float__",
    "__index__",
    "__int__",
    "equal",
    "item",
    "tolist",
}
_SHAPES_FROM_VALUES = {"argwhere", "bincount", "masked_select", "nonzero", "unique"}
_MAY_CROSS = {"copy_"}
_UNFILLED = {"empty", "empty_like", "empty_strided", "new_empty"}


class DeviceTensor(torch.Tensor):
    """A tensor on ``DEVICE``."""

    device = DEVICE
    is_cuda = True
    is_cpu = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "cpu":
            waits[name] += 1
            return on_host(args[0]).clone()
        if name == "to":
            return _moved(*args, **kwargs)
        waits[name] += _waits(name, args, kwargs)
        if name not in _MAY_CROSS:
            _refuse_the_cpus(name, (args, kwargs))
        if kwargs.pop("device", DEVICE) != DEVICE:
            raise NotImplementedError(f"{name} to another device")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return on_device(_filled(name, result))


class OnDevice(TorchFunctionMode):
    """While it is entered, tensors can be made on ``DEVICE`` and copied to it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ == "to":
            return _moved(*args, **kwargs)
        device = kwargs.get("device")
        if device is None or torch.device(device) != DEVICE or _has_device_tensor(args):
            return func(*args, **kwargs)
        if func.__name__ in ("tensor", "as_tensor"):
            waits[func.__name__] += 1  # copied from memory that is not pinned
        return on_device(_filled(func.__name__, func(*args, **{**kwargs, "device": "cpu"})))


def on_device(value: Any) -> Any:
    """The same with its tensors on the device: views, not copies."""
    return _mapped(value, lambda tensor: tensor.as_subclass(DeviceTensor))


def on_host(value: Any) -> Any:
    """The same with its tensors on the CPU: views, not copies."""
    return _mapped(value, lambda tensor: tensor.as_subclass(torch.Tensor))


def across(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose arguments come from the CPU to the device, and its result back."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with OnDevice():
            return on_host(function(*on_device(args), **on_device(kwargs)))

    return call


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``tensor.to(...)``."""
    target, kept = kwargs.pop("device", None), []
    for argument in args:
        if isinstance(argument, torch.device | str):
            target = argument
        elif isinstance(argument, torch.Tensor):
            raise NotImplementedError("tensor.to(another tensor)")
        else:
            kept.append(argument)
    waits_for_it = not kwargs.pop("non_blocking", False)
    was_here = isinstance(tensor, DeviceTensor)
    here = was_here if target is None else torch.device(target) == DEVICE
    plain: torch.Tensor = on_host(tensor)
    moved = plain.to(*kept, **kwargs) if kept or kwargs else plain
    if here != was_here:
        waits["to"] += waits_for_it
        moved = moved.clone() if moved is plain else moved
    elif moved is plain:
        return tensor
    return on_device(moved) if here else moved


def _waits(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the host has to know values to go on."""
    if name == "repeat_interleave":
        return "output_size" not in kwargs
    if name in _MAY_CROSS:
        return not kwargs.get("non_blocking")
    return name in _VALUES_ON_THE_HOST or name in _SHAPES_FROM_VALUES or _has_mask(name, args)


def _has_mask(name: str, args: Any) -> bool:
    if name not in ("__getitem__", "__setitem__"):
        return False
    if name == "__setitem__" and not isinstance(args[2], torch.Tensor):
        return False  # a masked fill
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in index)


def _refuse_the_cpus(name: str, arguments: Any) -> None:
    for leaf in _tensors(arguments):
        if not isinstance(leaf, DeviceTensor) and leaf.dim() > 0:
            raise RuntimeError(
                f"{name}: Expected all tensors to be on the same device, but found at least two "
                f"devices, {DEVICE} and cpu!"
            )


def _filled(name: str, result: Any) -> Any:
    """Nothing may be read before it is written."""
    if name in _UNFILLED:
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in _tensors(result):
                tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**6))
    return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _has_device_tensor(args: Any) -> bool:
    return any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves(args))
