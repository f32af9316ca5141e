"""The ring against a list from whose head the oldest fall."""

import torch

from cluster.queue import Queue


def pushes(count: int, rows: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, 3) for _ in range(count)]


def as_set(rows: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in rows.tolist()}


def test_the_oldest_fall_out_also_where_a_push_wraps_around() -> None:
    queue, kept = Queue(7, 3), torch.empty(0, 3)
    for vectors in pushes(9, 3):
        queue.push(vectors)
        kept = torch.cat([kept, vectors])[-7:]
        assert as_set(queue.rows) == as_set(kept)


def test_a_push_says_where_its_vectors_lie() -> None:
    queue = Queue(7, 3)
    for vectors in pushes(9, 3):
        places = queue.push(vectors)
        torch.testing.assert_close(queue.rows[places], vectors, rtol=0, atol=0)


def test_a_push_may_fill_the_whole_queue() -> None:
    queue = Queue(4, 3)
    for vectors in pushes(3, 4):
        queue.push(vectors)
        assert as_set(queue.rows) == as_set(vectors)


def test_it_is_full_once_every_place_was_filled_and_never_holds_places_that_were_not() -> None:
    queue = Queue(5, 3)
    filled = []
    for vectors in pushes(4, 2):
        queue.push(vectors)
        filled.append((len(queue.rows), queue.full))
    assert filled == [(2, False), (4, False), (5, True), (5, True)]


def test_it_holds_float32_without_gradients() -> None:
    queue = Queue(5, 3)
    queue.push(torch.randn(2, 3, dtype=torch.bfloat16).requires_grad_())
    assert queue.rows.dtype == torch.float32
    assert not queue.rows.requires_grad


def test_it_goes_on_from_its_state_and_the_state_is_a_copy() -> None:
    one, other = Queue(7, 3), Queue(7, 3)
    first, second, third = pushes(3, 5)
    one.push(first)
    one.push(second)
    state = one.state()
    other.load_state(state)
    torch.testing.assert_close(one.push(third), other.push(third))
    torch.testing.assert_close(one.rows, other.rows, rtol=0, atol=0)
    assert other.pushed == 15
    again = Queue(7, 3)
    again.load_state(state)
    assert again.pushed == 10
    assert as_set(again.rows) == as_set(torch.cat([first, second])[-7:])
