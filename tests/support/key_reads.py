"""Which attributes of the sections of a recipe are read, and where: the type checker knows what every expression is.

A mention in a docstring, a key of a dict or an attribute of the same name of another class is no read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from mypy import build
from mypy.modulefinder import BuildSource
from mypy.options import Options
from mypy.plugin import AttributeContext, Plugin
from mypy.types import Type

Reads = dict[str, set[str]]
"""`module.Class.field`, with the class that declares the field → the modules that read it."""


class _Recorder(Plugin):
    """Called for every access to an attribute of an instance."""

    def __init__(self, options: Options, package: str) -> None:
        super().__init__(options)
        self.reads: Reads = defaultdict(set)
        self._package = package

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        if not fullname.startswith(f"{self._package}."):
            return None

        def record(context: AttributeContext) -> Type:
            self.reads[fullname].add(context.api.path)  # type: ignore[attr-defined]
            return context.default_attr_type

        return record


def attribute_reads(files: Sequence[tuple[str, Path]], package: str) -> Reads:
    """Type-check modules, given as name and file, and return what each reads of the classes of `package`. Nothing else is
    followed: what other libraries return is not a section of ours. Takes about ten seconds for all of redline."""
    options = Options()
    options.follow_imports = "skip"
    options.no_site_packages = True
    options.check_untyped_defs = True
    options.incremental = False
    options.cache_dir = "/dev/null"
    recorder = _Recorder(options, package)
    build.build([BuildSource(str(file), name) for name, file in files], options, extra_plugins=[recorder])
    return dict(recorder.reads)
