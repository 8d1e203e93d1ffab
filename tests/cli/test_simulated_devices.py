# SPDX-License-Identifier: Apache-2.0
"""Simulated devices are asked for once, beside what XLA_FLAGS says already."""

import os

from switchx.cli import arguments


def test_adds_to_what_is_there(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    arguments.ask_for(8)
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=x --xla_force_host_platform_device_count=8"


def test_keeps_another_number(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    arguments.ask_for(8)
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"
