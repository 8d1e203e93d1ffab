# SPDX-License-Identifier: Apache-2.0
"""The operative configuration: every binding that was used, as a gin file to be used again."""

import itertools
import re

_STATEMENT = re.compile(r"^(?:(?P<scope>[\w/]+)/)?(?P<name>[\w.]+) = (?P<value>.*)$", re.DOTALL)


def without_scopes(text: str) -> str:
    """Gin's operative configuration with each parameter bound once, outside of all scopes.

    Gin evaluates a macro in a scope of its name and writes down `MODEL/config.d_ff = 64`,
    which a later `config.d_ff = 32` would not change: nothing could be set on top of the
    file. A parameter with different values in several scopes keeps its scopes.

    Args:
        text: of `gin.operative_config_str()`; comments are left out.
    """
    statements = [s for s in re.split(r"\n(?=\S)", text) if s and not s.startswith("#")]
    values: dict[str, dict[str, None]] = {}
    for match in filter(None, map(_STATEMENT.match, statements)):
        values.setdefault(match["name"], {})[match["value"].strip()] = None
    lines: dict[str, str] = {}
    for statement in statements:
        match, line = _STATEMENT.match(statement), statement.strip()
        if match and len(values[match["name"]]) == 1:
            line = f"{match['name']} = {match['value'].strip()}"
        lines[line] = match["name"].rpartition(".")[0] if match else "imports"
    sections = itertools.groupby(lines, key=lines.get)
    return "\n\n".join("\n".join(section) for _, section in sections) + "\n"
