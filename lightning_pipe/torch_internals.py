"""Every private name of torch that this package uses, with the reason: seen in torch 2.10, 2.13 and 2.15.

Functions and classes are imported from here. Attributes of objects are used where they are needed, and listed here.
"""

from __future__ import annotations

from lightning_pipe.errors import VersionError
from lightning_pipe.internals import check

VERSIONS = {"torch": ">=2.10,<2.16"}

_OWN = "replaced for the time of a run: there is no public place to stand"

NAMES = {
    "torch.utils._pytree": {
        **dict.fromkeys(
            ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"],
            "arguments and results of the user's functions hold tensors anywhere; torch.utils.pytree is as private",
        ),
        "register_pytree_node": "makes distributions known, and types of the user's own, by advice of an error",
    },
    "torch.utils._python_dispatch": {
        "TorchDispatchMode": "sees every operation: of a module built without memory, and to count them",
        "_disable_current_modes": "what was recorded is carried out unseen",
    },
    "torch.Tensor": {
        "_version": "how often autograd saw a tensor change in place",
        "_base": "what a tensor is a view of",
        "_is_zerotensor": "such a one has no memory to send",
        "_make_subclass": "a tensor of a class of ours around one of torch's",
        "_make_wrapper_subclass": "a tensor of a class of ours without memory",
        "_backward_hooks": "hooks of parameters are silent while a schedule runs: they act once, for the batch",
        "_post_accumulate_grad_hooks": "as _backward_hooks",
    },
    "torch.nn.Parameter": {"_is_param": "it sets it on a parameter of a class of ours: no user's attribute"},
    "torch.UntypedStorage": {"_cdata": "the same for tensors that share memory, also on meta"},
    "torch": {"_foreach_mul_": "all gradients times the factor of a loss in one kernel"},
    "torch._C": {
        "DisableTorchFunction": "our own bookkeeping is not part of the user's step",
        "DisableTorchFunctionSubclass": "absent parameters compute with torch itself",
        "_are_functorch_transforms_active": "nothing goes over a cut inside torch.func",
        "_current_graph_task_id": "whether a backward pass is under way on this thread",
        "_disabled_torch_function_impl": "placeholders answer in __torch_dispatch__ alone",
        "_pop_torch_function_stack": "the tracker is off the stack while a layer runs, which then costs nothing more",
        "_push_on_torch_function_stack": "as _pop_torch_function_stack",
        "_storage_Use_Count": "how many tensors share a memory",
    },
    "torch._C._autograd": {
        "_get_sequence_nr": "which nodes of the graph a layer has made",
        "_unsafe_set_version_counter": "a parameter that is put back into former memory has changed as often as that",
    },
    "torch._C._dynamo.eval_frame": dict.fromkeys(
        ["_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"],
        "a function that stands for the look-up of attributes is not compiled: its own look-ups would lead back to it",
    ),
    "torch._C._functorch": {"is_functorch_wrapped_tensor": "such a tensor has no memory to ask for"},
    "torch.overrides": {"_get_current_function_mode": "whether the tracker is on top of the stack"},
    "torch.ops.aten": {"_to_copy": "what needs values when it is on another device"},
    "torch._ops.OpOverload": {"_schema": "which arguments an operation changes in place"},
    "torch.autograd": {"_engine_run_backward": f"behind torch.autograd.grad and every backward; {_OWN}"},
    "torch.autograd.forward_ad": {"_current_level": "nothing goes over a cut inside forward-mode differentiation"},
    "torch.autograd.function.Function": {"_backward_cls": "the type of the nodes that a function of ours makes"},
    "torch._C._functions.AccumulateGrad": {"_sequence_nr": "a node of the graph tells when it was made"},
    "torch.utils.hooks.BackwardHook": {"_apply_on_tensors": f"puts a node before and behind a module; {_OWN}"},
    "torch.utils.checkpoint": {
        "_checkpoint_without_reentrant_generator": f"looked up by checkpoint(use_reentrant=False); {_OWN}",
    },
    "torch.nn.Module": {
        "_buffers": "a buffer is exchanged for another without a word to the user's __setattr__",
        "_parameters": "as _buffers",
        "_modules": "modules are walked, as by named_modules(), and chains of them under the names they have",
        "_compiled_call_impl": "what module.compile() sets: compiled code must not follow a wrapper",
        "_forward_hooks": "modules with hooks are not called through their compiled code",
        "_forward_pre_hooks": "as _forward_hooks",
    },
    "torch.nn.modules.batchnorm": {
        "_BatchNorm": "the base of all batch norms",
        "_NormBase": "the base of all norms with running statistics",
    },
    "torch.nn.modules.batchnorm._BatchNorm": {"_check_input_dim": "as its own forward begins"},
    "torch.nn.MultiheadAttention": {"_reset_parameters": "initialises it, as reset_parameters does other modules"},
    "torch.nn.modules.conv": {"_ConvNd": "the base of all convolutions"},
    "torch.nn.modules.rnn.RNNBase": {
        "_flat_weight_refs": "weak references, with which tensors cannot be swapped",
        "_flat_weights_names": "what they refer to",
    },
    "torch.optim.lr_scheduler.LRScheduler": {
        "_opt_called": "set on the optimizer by its step, which a schedule without a flush leaves out at first"
    },
    "torch.amp.grad_scaler.GradScaler": {"_unscale_grads_": f"looks for overflows; {_OWN}"},
    "torch.distributed._composable_state": {
        "_module_state_mapping": "knows the modules that fully_shard has divided, until they are put back"
    },
    "torch.distributed.distributed_c10d": {
        "_get_default_store": "the store over which the processes have met; Lightning asks for it too",
        "_world": "counts the groups of a process, which gives their names",
    },
}
"""The names, by owner, each with what it is used for."""

LATE = {
    "torch.distributed.checkpoint": {"_nested_dict": "puts what a folder has by paths back into containers"},
    "torch._dynamo.eval_frame.OptimizedModule": {"_orig_mod": "the module that torch.compile was given"},
    "torch.distributed.fsdp.FSDPModule": {"_get_fsdp_state": "what fully_shard knows of a module"},
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": {
        "_fsdp_param_groups": "the parameters of a module, each as a part and whole",
        "_init_shared_state": "before anything is gathered; FSDP's own hooks begin with the outermost module",
        "_is_root": "as _init_shared_state: each state begins by itself",
        "_modules": "what was given to fully_shard at once",
        "_state_ctx": "as _is_root",
        "_mp_policy": "types that a stage does not follow",
        "_post_forward_hook_handle": "its hooks act for every micro-batch, a stage for the batch",
        "_pre_forward_hook_handle": "as _post_forward_hook_handle",
        "_root_post_backward_final_callback": "sums gradients, as torch's own pipelining calls it",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": {
        "_post_load_hook_handle": "looks for the part of a parameter that another rank has",
        "_unsharded_param": "the whole parameter, which gets the gradients of a batch",
    },
    "torch.distributed.tensor.DTensor": {"_op_dispatcher": "knows how operations on DTensors are carried out"},
    "torch.distributed.tensor._dispatch.OpDispatcher": {
        "_custom_op_handlers": "operations that are carried out in another way: a number is read of the whole tensor"
    },
    "torch.distributed.tensor._dispatch.aten": {"_local_scalar_dense": "reads a number of a tensor"},
    "torch.distributed.tensor.placement_types": {
        "_StridedShard": "a part of each of several strips, as FSDP divides what tensor parallelism has divided"
    },
    "transformers.modeling_utils.PreTrainedModel": {
        "_init_weights": "initialises one of its modules",
        "_tp_plan": "which of its modules are divided over tensor ranks, and how",
    },
}
"""As `NAMES`, in modules that take seconds to import: they are looked for by tests alone."""

check(VERSIONS, NAMES)

# ruff: noqa: E402  what is missing is named above, all of it
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._C import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    _are_functorch_transforms_active,
    _current_graph_task_id,
    _disabled_torch_function_impl,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
    _storage_Use_Count,
)
from torch._C._autograd import _get_sequence_nr, _unsafe_set_version_counter
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributed._composable_state import _module_state_mapping as composable_states
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten

graph_nodes: Callable[[], int] = _get_sequence_nr
"""How many nodes autograd has made on this thread: what a layer makes has numbers between those before and after."""

set_version_counter: Callable[..., None] = _unsafe_set_version_counter
"""``set_version_counter(tensors, numbers)``: how often autograd has seen each change in place."""

disabled_torch_function: Any = _disabled_torch_function_impl
is_functorch_tensor: Callable[[torch.Tensor], bool] = is_functorch_wrapped_tensor
functorch_active: Callable[[], bool] = _are_functorch_transforms_active
storage_uses: Callable[[int], int] = _storage_Use_Count
pop_function_mode: Callable[[], Any] = _pop_torch_function_stack
push_function_mode: Callable[[Any], None] = _push_on_torch_function_stack
foreach_mul_: Callable[..., None] = torch._foreach_mul_
run_backward: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called, and nothing stands in its place now."""
    return vars(module).get("_compiled_call_impl") is not None


def named_parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """What ``module.named_parameters()`` yields, which resumes a generator for each level above a parameter."""
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}
    _visit(module, "", set(), found)
    return [*found.values()]


# Not within the other: a function that calls itself there would be left to the garbage collector.
def _visit(
    module: torch.nn.Module,
    path: str,
    seen: set[torch.nn.Module],
    found: dict[int, tuple[str, torch.nn.Parameter]],
) -> None:
    seen.add(module)
    for name, parameter in module._parameters.items():
        if parameter is not None and (key := id(parameter)) not in found:
            found[key] = f"{path}{name}", parameter
    for name, child in module._modules.items():
        if child is not None and child not in seen:
            _visit(child, f"{path}{name}.", seen, found)


def interrupting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let code that is compiled around calls of a function be interrupted there.

    As ``torch.compiler.disable`` does, which imports the compiler, for seconds, and takes microseconds for each call.
    """
    never_compile(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def never_compile(function: Callable[..., Any]) -> None:
    """Let ``torch.compile`` leave calls of a function, and what it calls, as they are.

    Code that calls it is compiled with what it does all the same.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def in_backward() -> bool:
    """Whether a backward pass is under way on this thread."""
    return _current_graph_task_id() != -1


def position_of(generator: torch.Generator) -> list[int]:
    """How far a generator is: it stands in its state behind the seed, and on the CPU before the numbers."""
    # whole states compare once the generator is seeded again, which takes four times as long
    return generator.get_state()[8:24].tolist()  # an array is refused inside torch.func


@lru_cache
def first_position(device: torch.device) -> list[int]:
    """That of a generator of a device from which nobody has drawn, whatever its seed.

    Raises:
        VersionError: a draw does not show in it.
    """
    generator = torch.Generator(device).manual_seed(0)
    first = position_of(generator)
    torch.rand(1, generator=generator, device=device)
    if position_of(generator) == first:
        raise VersionError(f"The states of generators of torch {torch.__version__} do not show how far these are.")
    return first
