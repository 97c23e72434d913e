"""Gradient buckets: every tensor in one of them, in the order of backward, and the last of them small."""

from collections import Counter

import torch

from gossamer.comm.bucket import partition

MIB = 2**20


def sizes(tensors: dict[str, torch.Tensor], *, bucket_bytes: int = 25 * MIB, at_least: int = 4) -> list[int]:
    layouts = partition(tensors, bucket_bytes=bucket_bytes, at_least=at_least)
    assert [e.name for one in layouts for e in one.entries] == list(reversed(tensors))
    return [one.numel * 4 // MIB for one in layouts]


def of_mib(*sizes_mib: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.empty(size * MIB // 4, device="meta") for i, size in enumerate(sizes_mib)}


def test_what_is_ready_last_is_sent_in_small_buckets() -> None:
    assert sizes(of_mib(*[1] * 32)) == [8, 8, 8, 4, 2, 1, 1]


def test_a_bucket_of_a_large_model_has_the_size_asked_for_until_little_is_left() -> None:
    assert sizes(of_mib(*[1] * 100), bucket_bytes=10 * MIB) == [10, 10, 10, 10, 10, 10, 10, 10, 10, 5, 2, 1, 1, 1]


def test_a_small_model_keeps_buckets_of_one_mib() -> None:
    assert sizes(of_mib(1, 1)) == [1, 1]


def test_a_tensor_that_is_larger_than_a_bucket_has_its_own() -> None:
    assert sizes(of_mib(30, 1, 1, 20)) == [20, 2, 30]


def test_an_exact_size_is_kept_to_the_end() -> None:
    assert sizes(of_mib(*[1] * 8), bucket_bytes=4 * MIB, at_least=1) == [4, 4]


def test_thousands_of_tensors_are_looked_at_a_few_times_each() -> None:
    """Not once more for every other tensor of their bucket."""
    asked = Counter[str]()

    class Asked:
        dtype, device, shape = torch.float32, torch.device("cpu"), (8,)

        def numel(self) -> int:
            asked["numel"] += 1
            return 8

        def element_size(self) -> int:
            return 4

    (one,) = partition({f"t{i}": Asked() for i in range(2000)}, bucket_bytes=MIB, at_least=1)  # type: ignore[misc]
    assert [e.start for e in one.entries] == list(range(0, 16000, 8))
    assert asked["numel"] <= 8 * 2000
