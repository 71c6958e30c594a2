"""The options of ``python -m examples.sweep``: those of examples.qlora, and what varies."""

import itertools
import typing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fquant.tree import expect

from ..common.command_line import spelled
from ..qlora import options as qlora

# What may vary: all that changes data, adapters or optimiser, and neither the base nor the shape of a step.
VARIED = (
    "lr", "rank", "alpha", "seed", "data", "dropout", "optimizer", "weight_decay", "clip", "schedule", "warmup",
)  # fmt: skip
DEMO = ("lr=3e-3,1e-2,3e-2", "rank=4,16")


@dataclass(frozen=True)
class Options(qlora.Options):
    """Train an adapter for every combination of some options, over one base and in one captured step, and choose.

    Each experiment has the bits of python -m examples.qlora with its options. The others are those of examples.qlora.
    """

    vary: tuple[str, ...] = ()
    """Options and their values, as in --vary lr=1e-4,3e-4 rank=8,32 seed=0,1 data=a.jsonl,b.jsonl; each combination is
    an experiment. Default, for the model that is shipped: lr=3e-3,1e-2,3e-2 rank=4,16."""

    def check(self) -> None:
        """Raise ValueError for values out of range, before anything is started or read."""
        super().check()
        expect(self.train == "lora", "--train full of a sweep; wanted lora, or a run of examples.qlora for each")
        fault = "measures the base of one run; leave it out, or use examples.qlora"
        expect(not self.compare_dense, f"--compare-dense {self.compare_dense} {fault}")
        for one in self.experiments():
            one.check()
        for name in self.values() if self.resume is None else ():
            given = getattr(self, name)
            fault = f"{spelled(name, given)} with --vary {name}=..., which has its own values"
            expect(given == Options.__dataclass_fields__[name].default, f"{fault}; leave one out")
        names = self.names()
        expect(len(set(names)) == len(names), "--vary: two values have one name; leave one out, or rename the file")

    def check_used(self) -> None:
        """Check nothing, because each experiment is checked with its own values."""

    def values(self) -> dict[str, list[Any]]:
        """Return the values of each option that varies; raise ValueError for what cannot be read."""
        types, out = typing.get_type_hints(qlora.Options), dict[str, list[Any]]()
        for text in self.vary or (DEMO if self.model == qlora.SHIPPED else ()):
            name, _, rest = text.partition("=")
            name = name.strip().lstrip("-").replace("-", "_")
            expect(name in VARIED, f"--vary {text}: {name!r} cannot vary; wanted one of {', '.join(VARIED)}")
            expect(name not in out, f"--vary {text}: {name!r} is given twice; wanted all its values in one place")
            out[name] = [_parsed(text, part.strip(), types[name]) for part in rest.split(",")]
        expect(out, "--vary: got nothing, wanted at least one option and its values, such as lr=1e-4,3e-4")
        return out

    def names(self) -> list[str]:
        """Return the name of each experiment: its values of what varies."""
        return [",".join(f"{option}={of(one, option)}" for option in self.values()) for one in self.experiments()]

    def experiments(self) -> list[qlora.Options]:
        """Return the options of each experiment alone."""
        values, own = self.values(), {field.name: getattr(self, field.name) for field in fields(qlora.Options)}
        rows = itertools.product(*values.values())
        return [replace(qlora.Options(**own), **dict(zip(values, row, strict=True))) for row in rows]


def of(one: qlora.Options, option: str) -> str:
    """Return the value of an option as text: of data the name of the file without its ending."""
    x = getattr(one, option)
    return Path(x).stem if option == "data" and x is not None else f"{x:g}" if isinstance(x, float) else str(x)


def _parsed(text: str, part: str, kind: Any) -> Any:
    """Return one value of an option of the type ``kind``."""
    choices = typing.get_args(kind)
    for one in (int, float, Path):
        if kind is one or one in choices:
            try:
                return one(part)
            except ValueError:
                raise ValueError(f"--vary {text}: cannot read {part!r}; wanted a number") from None
    if str in choices:
        return part
    expect(part in choices, f"--vary {text}: got {part!r}; wanted one of {', '.join(map(str, choices))}")
    return part
