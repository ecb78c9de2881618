"""Prometheus pages as text: our own families, and the pages of several engines in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Family = tuple[str, str, str, float | Mapping[int, int], str]


def format_families(*families: Family) -> str:
    """(name, type, help, value or {label value: value}, label name) of each family -> exposition text."""
    lines: list[str] = []
    for name, kind, about, value, label in families:
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        if isinstance(value, Mapping):
            lines += [f'{name}{{{label}="{key}"}} {number}' for key, number in sorted(value.items())]
        else:
            lines.append(f"{name} {value}")
    return "\n".join(lines) + "\n"


def merge_pages(pages: Sequence[tuple[str, str]]) -> str:
    """(engine, its page) of several engines -> one page; every sample carries the engine as the label `replica`."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for engine, page in pages:
        name = ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                comments, _ = families.setdefault(name, ([], []))
                if line not in comments:
                    comments.append(line)
            elif line and not line.startswith("#"):
                families.setdefault(name, ([], []))[1].append(_with_label(line, engine))
    return "".join(f"{line}\n" for comments, samples in families.values() for line in (*comments, *samples))


def _with_label(sample: str, engine: str) -> str:
    head, brace, rest = sample.partition("{")
    if brace:
        return f'{head}{{replica="{engine}"{"" if rest.startswith("}") else ","}{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{engine}"}} {value}'
