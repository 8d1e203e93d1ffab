# SPDX-License-Identifier: Apache-2.0
"""The private names of gin that switchx uses, in the version that is installed."""

import importlib.metadata

import gin
import pytest

from switchx.gin_config import gin_internals
from switchx.gin_config.gin_internals import _LATER, _OTHERS, _TABLES

VERSION = importlib.metadata.version("gin-config")


@pytest.mark.parametrize("name", _TABLES | _OTHERS)
def test_the_installed_gin_has_each_name_and_another_is_refused(name, monkeypatch):
    assert isinstance(getattr(gin.config, name), (_TABLES | _OTHERS)[name]), VERSION
    kind = (_TABLES | _OTHERS)[name].__name__
    said = f"gin-config {VERSION} has other internals than 0.5.0: "
    with monkeypatch.context() as patched:
        patched.setattr(gin.config, name, ())
        with pytest.raises(
            ImportError, match=f"^{said}{name} is a tuple for a {kind}; run `pip"
        ):
            gin_internals.require_names()
        patched.delattr(gin.config, name)
        with pytest.raises(ImportError, match=f"^{said}there is no {name}; run `pip "):
            gin_internals.require_names()
    gin_internals.require_names()


def test_what_is_bound_and_read(monkeypatch):
    for name in _LATER:
        monkeypatch.setattr(gin.config, name, {}, raising=False)
    with gin_internals.restored():
        gin.clear_config()
        mine = gin.configurable("mine", module="of_this")(lambda depth=1, width=2: depth)
        gin.parse_config("DEPTH = 5\nOTHER = 6\nof_this.mine.depth = %DEPTH\nmine.width = 3")
        assert gin_internals.macros() == {"DEPTH": 5, "OTHER": 6}
        assert gin_internals.bindings()["", "of_this.mine"].keys() == {"depth", "width"}
        assert gin_internals.read_macros() == gin_internals.read_parameters() == set()
        assert mine() == 5
        assert gin_internals.read_macros() == {"DEPTH"}
        assert ("of_this.mine", "width") in gin_internals.read_parameters()
        key = gin_internals.key_of("scope/mine.depth")
        assert (key.scope, key.given_selector) == ("scope", "mine")
        assert (key.complete_selector, key.arg_name) == ("of_this.mine", "depth")
        assert gin_internals.registered()["of_this.mine"](depth=7) == 7
    assert "of_this.mine" not in gin_internals.registered()
    assert "DEPTH" not in gin_internals.macros()
