"""ES modules → few files, so that a page loads two scripts in place of twenty.

The module `page`, which every page loads, carries all modules that several pages import; a page's
own script carries what it alone imports. A module still runs once, at its first import. The form of
the sources is limited to what this project writes: `import { a, b as c } from "./x.js";`,
`import "./x.js";`, and `export` in front of `const`, `class`, `function` or `async function`, each
at the start of a line. Everything else is refused with its file and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

SHARED: Final = "page"
_IMPORT: Final = re.compile(r'import (?:\{([^}]*)\} from )?"\./([\w-]+)\.js";[ \t]*(?=\n|$|//|/\*)')
_EXPORT: Final = re.compile(r"export ((?:async )?function\*? |class |const )([\w$]+)")
_OTHER: Final = re.compile(r"(?:import|export)\b(?!\s*\()|await\b")


@dataclass(frozen=True, slots=True)
class Module:
    """One source: `body` without imports and exports, `imports` as (names, module)."""

    name: str
    body: str
    imports: tuple[tuple[tuple[tuple[str, str], ...], str], ...]
    exports: tuple[str, ...]


def bundle(sources: Mapping[str, str]) -> dict[str, str]:
    """The text to serve for each module of `sources`, by name.

    Scripts without imports and exports that no module imports are left as they are. Raises
    ValueError for a form that is not supported, a missing module or name, and circular imports.
    """
    modules = {name: _parse(name, text) for name, text in sources.items()}
    imported = {other for module in modules.values() for _, other in module.imports}
    plain = {
        name
        for name, module in modules.items()
        if not module.imports and not module.exports and name not in imported and name != SHARED
    }
    modules = {name: module for name, module in modules.items() if name not in plain}
    for module in modules.values():
        _check(module, modules)
    closures = {name: tuple(_closure(name, modules)) for name in modules}
    entries = [name for name in modules if name not in imported and name != SHARED]
    uses: dict[str, int] = {}
    for entry in entries:
        for name in closures[entry]:
            uses[name] = uses.get(name, 0) + 1
    shared = {name for name in modules if uses.get(name, 0) > 1}
    if SHARED in modules:
        shared |= set(closures[SHARED])
    # what a shared module imports is shared as well, even if one page imports it
    shared |= {name for member in shared for name in closures[member]}
    served = {name: sources[name] for name in plain}
    for name, module in modules.items():
        if name == SHARED:
            served[name] = _shared(modules[member] for member in sorted(shared))
        else:
            own = [modules[member] for member in closures[name] if member not in shared]
            served[name] = _entry(module, own)
    return served


def _parse(name: str, text: str) -> Module:
    imports: list[tuple[tuple[tuple[str, str], ...], str]] = []
    exports: list[str] = []
    lines: list[str] = []
    position = 0
    while position < len(text):
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        if match := _IMPORT.match(text, position):
            imports.append((_names(match[1] or ""), match[2]))
            end = text.find("\n", match.end())
            end = len(text) if end < 0 else end
            lines.append(text[match.end() : end])
        elif match := _EXPORT.match(text, position):
            exports.append(match[2])
            lines.append(match[0].removeprefix("export ") + text[match.end() : end])
        elif _OTHER.match(text, position):
            line = text.count("\n", 0, position) + 1
            raise ValueError(
                f"{name}.js, line {line}: this form of import, export or await cannot be bundled; "
                "webui/bundling/modules.py lists the supported ones"
            )
        else:
            lines.append(text[position:end])
        position = end + 1
    return Module(name, "\n".join(lines).strip("\n"), tuple(imports), tuple(exports))


def _names(text: str) -> tuple[tuple[str, str], ...]:
    """`a, b as c` as ((a, a), (b, c))."""
    pairs = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, own = part.partition(" as ")
        pairs.append((name.strip(), (own or name).strip()))
    return tuple(pairs)


def _check(module: Module, modules: Mapping[str, Module]) -> None:
    for names, other in module.imports:
        if other not in modules:
            raise ValueError(f"{module.name}.js imports {other}.js, which does not exist")
        for name, _ in names:
            if name not in modules[other].exports:
                raise ValueError(
                    f"{module.name}.js imports {name} from {other}.js, which does not export it"
                )


def _closure(name: str, modules: Mapping[str, Module], path: tuple[str, ...] = ()) -> list[str]:
    """The module and all that it imports, those first."""
    if name in path:
        raise ValueError("circular import: " + " → ".join((*path, name)))
    order: list[str] = []
    for _, other in modules[name].imports:
        order += [
            member for member in _closure(other, modules, (*path, name)) if member not in order
        ]
    return [*order, name]


def _maker(module: Module) -> str:
    lines = [f'$modules["{module.name}"] ??= () => {{']
    for names, other in module.imports:
        taken = ", ".join(name if name == own else f"{name}: {own}" for name, own in names)
        lines.append(f'const {{ {taken} }} = $use("{other}");' if names else f'$use("{other}");')
    lines += [module.body, f"return {{ {', '.join(module.exports)} }};", "};"]
    return "\n".join(lines)


def _shared(modules: Iterable[Module]) -> str:
    modules = list(modules)
    names = next((module.exports for module in modules if module.name == SHARED), ())
    exports = (f"export const {{ {', '.join(names)} }} = " if names else "") + f'$use("{SHARED}");'
    return "\n".join(
        (
            "export const $modules = {};",
            "const $made = {};",
            "export const $use = (name) => ($made[name] ??= $modules[name]());",
            *map(_maker, modules),
            exports,
            "",
        )
    )


def _entry(module: Module, own: Iterable[Module]) -> str:
    """A page's script, or a module by itself: it takes the shared modules from `page`."""
    exports = f"export const {{ {', '.join(module.exports)} }} = " if module.exports else ""
    return "\n".join(
        (
            f'import {{ $modules, $use }} from "./{SHARED}.js";',
            *map(_maker, own),
            f'{exports}$use("{module.name}");',
            "",
        )
    )
