# SPDX-License-Identifier: Apache-2.0
"""The queue: bounded, in order, by groups, and without those who left."""

import threading
import time

from switchx.serving.limits import Limits
from switchx.serving.requests import AnswerSettings
from switchx.serving.scheduler import Group, WaitingInput, WaitingRoom


def waiting(name: int, prompt_length=16) -> WaitingInput:
    group = Group(prompt_length, 16, 1, False)
    return WaitingInput([5], AnswerSettings(4), name, group, deliver=lambda event: None)


def numbers(batch):
    return [each.number for each in batch]


def test_groups_are_of_sizes_and_kinds():
    limits = Limits(max_new_tokens=100)

    def group(prompt=20, **settings):
        settings = AnswerSettings(**({"max_new_tokens": 5} | settings))
        return Group.of([5] * prompt, settings, limits)

    assert group() == group(prompt=30, max_new_tokens=16, length_penalty=2.0)
    assert group(temperature=0.5, seed=1) == group(temperature=2.0, top_k=4)
    kinds = [group(), group(9), group(max_new_tokens=20), group(beam_size=2),
             group(temperature=1.0)]  # fmt: skip
    assert len(set(kinds)) == 5


def test_all_or_none_are_taken_in():
    room = WaitingRoom(3, 8, 0.0)
    assert room.put([waiting(0), waiting(1)])
    assert not room.put([waiting(2), waiting(3)]) and len(room) == 2
    assert room.put([waiting(4)]) and len(room) == 3
    room.close()
    assert not WaitingRoom.put(room, [])


def test_the_oldest_group_is_next_in_order():
    room = WaitingRoom(99, 3, 0.0)
    room.put([waiting(0, 16), waiting(1, 32), waiting(2, 16), waiting(3, 16), waiting(4, 16)])
    assert numbers(room.take()) == [0, 2, 3]
    assert numbers(room.take()) == [1]
    assert numbers(room.take()) == [4]


def test_an_input_waits_for_others_but_not_for_ever():
    room = WaitingRoom(99, 2, 0.2)
    room.put([waiting(0)])
    timer = threading.Timer(0.02, lambda: room.put([waiting(1)]))
    timer.start()
    start_s = time.monotonic()
    assert numbers(room.take()) == [0, 1] and time.monotonic() - start_s < 0.2
    room.put([waiting(2)])
    assert numbers(room.take()) == [2] and time.monotonic() - start_s > 0.2


def test_who_leaves_is_not_taken_and_makes_room():
    room = WaitingRoom(2, 8, 0.0)
    gone = waiting(0)
    room.put([gone, waiting(1)])
    room.abandon([gone])
    assert gone.is_abandoned and len(room) == 1
    assert room.put([waiting(2)]) and numbers(room.take()) == [1, 2]


def test_a_closed_room_lets_its_worker_go():
    room, taken = WaitingRoom(9, 8, 0.0), []
    thread = threading.Thread(target=lambda: taken.append(room.take()))
    thread.start()
    room.close()
    thread.join(5)
    assert taken == [[]]
