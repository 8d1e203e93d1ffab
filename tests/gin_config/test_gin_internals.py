# SPDX-License-Identifier: Apache-2.0
"""The private names of gin that switchx uses, in the version that is installed."""

import importlib.metadata

import gin
import pytest

from switchx.gin_config import gin_internals

VERSION = importlib.metadata.version("gin-config")


@pytest.mark.parametrize(("name", "kind"), gin_internals.NAMES.items())
def test_the_installed_gin_has_each_name_and_one_without_is_refused(name, kind, monkeypatch):
    assert isinstance(getattr(gin.config, name), kind), VERSION
    said = (
        f"gin-config {VERSION} has other internals than 0.5.0: {name} is a tuple, expected a "
    )
    monkeypatch.setattr(gin.config, name, ())
    with pytest.raises(ImportError, match=f"^{said}{kind.__name__}; run `pip install gin"):
        gin_internals.require_names()


def test_what_is_bound_and_read():
    with gin_internals.restored():
        gin.clear_config()
        mine = gin.configurable("mine", module="of_this")(lambda depth=1, width=2: depth)
        gin.parse_config("DEPTH = 5\nOTHER = 6\nof_this.mine.depth = %DEPTH\nmine.width = 3")
        assert gin_internals.macros() == {"DEPTH": 5, "OTHER": 6}
        assert gin_internals.bindings()["", "of_this.mine"].keys() == {"depth", "width"}
        assert gin_internals.read_macros() == set()
        assert gin_internals.reading_scopes("of_this.mine", "width") == set()
        assert mine() == 5
        assert gin_internals.read_macros() == {"DEPTH"}
        assert gin_internals.reading_scopes("of_this.mine", "width") == {""}
        key = gin_internals.key_of("scope/mine.depth")
        assert (key.scope, key.given_selector) == ("scope", "mine")
        assert (key.complete_selector, key.arg_name) == ("of_this.mine", "depth")
        assert gin_internals.registered()["of_this.mine"](depth=7) == 7
    assert "of_this.mine" not in gin_internals.registered()
    assert "DEPTH" not in gin_internals.macros()
