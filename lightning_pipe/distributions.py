"""The modules that use Lightning, for both of its distributions: ``lightning`` and ``pytorch_lightning``.

The two are made of one source and hold the same classes under two names, so that a strategy of one is none for a
Trainer of the other. What imports Lightning in this package is loaded a second time for ``pytorch_lightning``, from the
same files, with the names that are different there::

    lightning_pipe.trainer.strategy                       lightning.pytorch, lightning.fabric
    lightning_pipe.pytorch_lightning.trainer.strategy     pytorch_lightning, lightning_fabric

Nothing is imported before it is asked for, neither distribution by itself.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, TypeVar

import wrapt

from lightning_pipe.errors import ConfigurationError

_PACKAGE, _SECOND = "lightning_pipe", "lightning_pipe.pytorch_lightning"
_RENAMED = {f"{_PACKAGE}.{name}": f"{_SECOND}.{name}" for name in ("callbacks", "lightning_internals", "trainer")}
# the first one that fits counts
_RENAMED |= {
    "lightning.fabric": "lightning_fabric",
    "lightning.pytorch": "pytorch_lightning",
    "lightning": "pytorch_lightning",
}

T = TypeVar("T", bound=type)


def install() -> None:
    """Let ``lightning_pipe.pytorch_lightning`` be imported. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def home(module: str) -> str:
    """Where a module is for the distribution that this process has imported; for ``lightning`` if it has both.

    Args:
        module: one that imports Lightning.
    """
    only_second = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return renamed(module) if only_second else module


def of_maker(kind: T, value: object) -> T:
    """A class of this package, for the distribution that an object comes from.

    Args:
        kind: the class, for either distribution.
        value: the object; see `maker`.

    Raises:
        ConfigurationError: the class is not of this package, but derives from one that is.
    """
    own, second = kind.__module__.replace(_SECOND, _PACKAGE), maker(value) == "pytorch_lightning"
    if not own.startswith(f"{_PACKAGE}."):
        raise ConfigurationError(
            f"{kind.__name__} derives from a class for the other distribution of Lightning than {maker(value)}.",
            hint="Import lightning_pipe behind the distribution that you use, and no other one; or derive from "
            f"{_SECOND if second else _PACKAGE}.trainer.strategy.PipeStrategy.",
        )
    home = renamed(own) if second else own
    found: T = getattr(importlib.import_module(home), kind.__name__)
    return found


def maker(value: object) -> str | None:
    """The distribution that an object comes from; ``None``: it is none of Lightning's.

    Args:
        value: an object of a class of Lightning's, or of one that derives from it.
    """
    packages = (each.__module__.partition(".")[0] for each in type(value).__mro__)
    return next((name for name in packages if name in ("lightning", "pytorch_lightning")), None)


def be_strategy_of_both(kind: T) -> T:
    """Let the Trainers of both distributions take a strategy for one; the strategy becomes its like in the Trainer's.

    Args:
        kind: the strategy. It keeps its arguments for its like; a Trainer sets the accelerator first.
    """
    changed: Any = kind
    create, plain = changed.__init__, changed.accelerator

    @wraps(create)
    def make(strategy: Any, *args: Any, **options: Any) -> None:
        strategy.given = args, options
        create(strategy, *args, **options)

    def set_accelerator(strategy: Any, accelerator: Any) -> None:
        if maker(accelerator) not in (None, maker(strategy)):
            other = of_maker(type(strategy), accelerator)
            args, options = strategy.given
            vars(strategy).clear()
            strategy.__class__ = other
            strategy.__init__(*args, **options)
        plain.fset(strategy, accelerator)

    def register(module: ModuleType) -> None:
        module.ParallelStrategy.register(kind)

    changed.__init__, changed.accelerator = make, property(plain.fget, set_accelerator)
    for name in ("lightning.pytorch.strategies", "pytorch_lightning.strategies"):
        wrapt.register_post_import_hook(register, name)
    return kind


def renamed(name: str) -> str:
    """What a module is called for ``pytorch_lightning``.

    Example:
        >>> renamed("lightning.fabric.utilities"), renamed("lightning_pipe.trainer.run"), renamed("torch")
        ('lightning_fabric.utilities', 'lightning_pipe.pytorch_lightning.trainer.run', 'torch')
    """
    for old, new in _RENAMED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


class _Finder(MetaPathFinder):
    """Finds the modules of ``lightning_pipe.pytorch_lightning``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname == _SECOND:
            return ModuleSpec(fullname, None, is_package=True)
        own = find_spec(fullname.replace(_SECOND, _PACKAGE)) if fullname.startswith(f"{_SECOND}.") else None
        if own is None or own.origin is None:
            return None
        # a package without a folder: Python would find the modules there as they are
        package = own.submodule_search_locations is not None
        spec = ModuleSpec(fullname, _Loader(fullname, own.origin), origin=own.origin, is_package=package)
        spec.has_location = True
        return spec


class _Loader(SourceFileLoader):
    """Loads a module with other names in its imports, and in its strings that name modules of Lightning."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = _Names().visit(ast.parse(self.get_data(path), path))
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code


class _Names(ast.NodeTransformer):
    def visit_Import(self, node: ast.Import) -> Any:
        for each in node.names:
            each.name = renamed(each.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        node.module = renamed(node.module or "")
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, str):
            node.value = renamed(node.value)
        return node
