"""What builds the module of a saved model: a callable of a package, or of a file that is copied beside the rows.

No object of the user's is pickled. Opening a model imports the callable, or runs the file: a model is code, to be
opened only where its writer is trusted.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from gba_hvd.errors import BadInput, MissingPackage
from gba_hvd.serving.manifest import BuilderRecord
from gba_hvd.serving.stored_bytes import get_verified, put_file, sha256_of
from recovery.storage.store import Store

log = logging.getLogger("gba_hvd")
_HOW = "'package.module:callable', or 'file.py:callable', which is copied with the model"


@dataclass(frozen=True)
class Builder:
    """target: of `BuilderRecord`; code: the text of the file, None: it is imported. what: it builds, in words."""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    code: bytes | None = None
    what: str = "the model"

    @classmethod
    def of(cls, build: str | None, arguments: Mapping[str, Any] | None, model: nn.Module | None) -> Builder:
        """build: as `save_model` takes it; None: the class of the model. Raises BadInput."""
        arguments = dict(arguments or {})
        try:
            if json.loads(json.dumps(arguments, allow_nan=False)) != arguments:
                raise ValueError("they come back as other values, such as lists in place of tuples")
        except (TypeError, ValueError) as error:
            raise BadInput(f"arguments must be plain JSON with string keys, which they are not: {error}") from error
        if build is None:
            kind = type(model)
            if model is None or kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
                what = "no build=" if model is None else f"{kind.__qualname__} is defined in {kind.__module__!r}"
                raise BadInput(f"{what}, so nothing can build the model elsewhere: build={_HOW}")
            build = f"{kind.__module__}:{kind.__qualname__}"
        return cls._named("build", build, _HOW, arguments, "the model")

    @classmethod
    def of_example(cls, named: str) -> Builder:
        """What makes an input of the model: 'package.module:callable' or 'file.py:callable'. Raises BadInput."""
        return cls._named("example", named, "'package.module:callable' or 'file.py:callable'", {}, "the example")

    @classmethod
    def _named(cls, option: str, named: str, how: str, arguments: dict[str, Any], what: str) -> Builder:
        place, colon, name = named.rpartition(":")
        if not colon or not place or not name:
            raise BadInput(f"{option}={named!r}: expected {how}")
        if not place.endswith(".py"):
            return cls(named, arguments, None, what)
        try:
            return cls(name, arguments, Path(place).read_bytes(), what)
        except OSError as error:
            raise BadInput(f"{option}={named!r}: {place} cannot be read: {error.strerror}") from error

    @classmethod
    def stored(cls, store: Store, record: BuilderRecord) -> Builder:
        data = None if record.code is None else bytes(get_verified(store, record.code))
        return cls(record.target, record.arguments, data)

    def put(self, store: Store) -> BuilderRecord:
        imported = self._imports()
        if "horovod" in imported:
            log.warning(
                "%s imports horovod, which a machine that opens the model needs then, too: put the model into a file "
                "of its own, or import horovod in the functions that train", self,
            )  # fmt: skip
        if local := sorted(_of_no_package(imported)):
            log.warning(
                "%s imports %s, of no installed package: only the file itself is copied with the model, so where it is "
                "opened their folder must be on PYTHONPATH. Or put the code in the file, or in a package",
                self, ", ".join(local),
            )  # fmt: skip
        code = None if self.code is None else put_file(store, [self.code], "py")
        return BuilderRecord(self.target, self.arguments, code)

    def build(self) -> nn.Module:
        """Raises BadInput where nothing is found under the target, it needs what is not installed, or returns no
        module."""
        made = self.call()
        if not isinstance(made, nn.Module):
            raise BadInput(f"{self} returned a {type(made).__name__}, expected an nn.Module")
        return made

    def call(self) -> Any:
        """What the callable returns."""
        with self._naming_what_is_missing():
            return self.checked()(**self.arguments)

    def checked(self) -> Callable[..., Any]:
        """The callable. Raises BadInput where it cannot be called with the arguments."""
        found = self._callable()
        try:
            signature = inspect.signature(found)
        except ValueError:  # some built-in types have none
            return found
        try:
            signature.bind(**self.arguments)
        except TypeError as error:
            given = ", ".join(self.arguments) or "none"
            raise BadInput(
                f"{self} cannot be called with arguments= of {given}: {error}"
                + ". A builder makes the whole model, tables included, of plain JSON" * (self.what == "the model")
            ) from error
        return found

    def __str__(self) -> str:
        return self.target if self.code is None else f"{self.target} of {self.what}'s code file"

    @property
    def module_name(self) -> str:
        """Of a file, where Python finds it once it ran."""
        return f"gba_hvd_model_{sha256_of([self.code or b''])[:16]}"

    def _imports(self) -> set[str]:
        """What a file imports at its top."""
        names = set[str]()
        if self.code is None:
            return names
        for node in ast.parse(self.code).body:
            if isinstance(node, ast.Import):
                names |= {one.name.partition(".")[0] for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
        return names

    @contextlib.contextmanager
    def _naming_what_is_missing(self) -> Iterator[None]:
        """Raises BadInput where Python finds no module that the builder needs, or not what it imports from one."""
        try:
            yield
        except MissingPackage:
            raise
        except ModuleNotFoundError as error:
            raise BadInput(
                f"{self.what} is built by {self}, which needs {error.name or error}, and that is not installed here: "
                f"install it for {sys.executable}, or put the folder that has it on PYTHONPATH, or name a "
                f"'file.py:callable' that does not need it. It was looked for in {', '.join(sys.path)}"
            ) from error
        except ImportError as error:
            raise BadInput(
                f"{self.what} is built by {self}, which imports what is not there: {error}. Another version of that "
                f"package is installed for {sys.executable} than that code was written for"
            ) from error

    def _callable(self) -> Callable[..., Any]:
        name = self.target.rpartition(":")[2]
        found: Any = self._module()
        for part in name.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise BadInput(f"{self}: there is no callable {name!r}")
        return found  # type: ignore[no-any-return]

    def _module(self) -> ModuleType:
        if self.code is None:
            return importlib.import_module(self.target.rpartition(":")[0])
        name = self.module_name
        if name not in sys.modules:
            module = ModuleType(name)
            sys.modules[name] = module  # (dataclasses look their module up while it runs)
            try:
                exec(compile(self.code, f"{name}.py", "exec"), module.__dict__)
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]


def _of_no_package(modules: set[str]) -> set[str]:
    """Those that neither Python has nor an installed package."""
    ours = {"gba_hvd", "recovery"}
    unknown = {name for name in modules - sys.stdlib_module_names - ours if not _is_in_site_packages(name)}
    return unknown - packages_distributions().keys() if unknown else unknown  # (which reads the lists of all packages)


def _is_in_site_packages(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # made at run time
        return False
    folders = (os.path.join(sysconfig.get_path(kind), "") for kind in ("purelib", "platlib"))
    return spec is not None and spec.origin is not None and spec.origin.startswith(tuple(folders))
