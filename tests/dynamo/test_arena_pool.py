"""Memory that graphs lend: who gets which block, and what is given back."""

from __future__ import annotations

import torch

from ortgraph.dynamo.arena_pool import Pool, Results


def test_a_block_serves_whoever_fits_and_is_never_lent_twice():
    pool = Pool(kept=1)
    first = pool.take(1000)
    at = first.data_ptr()
    part = first[10:20]
    del first
    other = pool.take(1000)  # a part of the first is in use
    assert other.data_ptr() != at
    del part
    small = pool.take(100)
    assert small.data_ptr() == at and small.numel() == 100
    del small, other
    assert len(pool._free) == 1
    large = pool.take(5000)
    assert not pool._free and large.numel() == 5000


def test_results_of_two_functions_share_memory():
    types = [((1024, 300), torch.float32)] * 2
    one, two = Results(types), Results(types[:1])
    addresses = {t.data_ptr() for t in one.take()}
    (found,) = two.take()
    assert len(addresses) == 2 and found.data_ptr() in addresses and found.shape == (1024, 300)
