# SPDX-License-Identifier: Apache-2.0
"""Reporters of a training run."""


class Events(list):
    """A reporter that writes down what it is told; `at(step)` is called after each step."""

    def __init__(self, at=lambda step: None):
        self._at = at

    def begin(self, first_step, last_step):
        self.append(("begin", first_step, last_step))

    def stepped(self, step):
        self.append(("stepped", step))
        self._at(step)

    def logged(self, step, metrics):
        self.append(("logged", step))

    def evaluated(self, step, metrics):
        self.append(("evaluated", step))

    def note(self, text):
        self.append(("note", text))

    @property
    def notes(self):
        return [event[1] for event in self if event[0] == "note"]
