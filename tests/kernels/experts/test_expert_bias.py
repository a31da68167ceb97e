"""The bias of experts: what a sum over thousands of rows in bf16 keeps of them."""

import torch

from moefold.kernels.experts.expert_bias import expert_bias


def test_the_gradient_of_many_rows_in_bf16_is_rounded_once():
    rows = 3000
    generator = torch.Generator().manual_seed(0)
    dy_RN = torch.rand(rows, 4, generator=generator).bfloat16()
    bias_EN = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    ends_E = torch.tensor([rows - 7, rows], dtype=torch.int32)
    y_RN = expert_bias.reference(torch.zeros_like(dy_RN), bias_EN, ends_E)
    y_RN.backward(dy_RN)
    first, last = dy_RN.double().split([rows - 7, 7])
    exact_EN = torch.stack([first.sum(0), last.sum(0)])
    assert bias_EN.grad is not None
    torch.testing.assert_close(bias_EN.grad.double(), exact_EN, rtol=2**-8, atol=0)


def test_threads_of_a_cpu_sum_in_one_order():
    rows, width = 4096, 256
    generator = torch.Generator().manual_seed(0)
    dy_RN = torch.randn(rows, width, generator=generator)
    ends_E = torch.tensor([rows], dtype=torch.int32)

    def gradient() -> torch.Tensor:
        bias_EN = torch.zeros(1, width, requires_grad=True)
        expert_bias.reference(torch.zeros_like(dy_RN), bias_EN, ends_E).backward(dy_RN)
        assert bias_EN.grad is not None
        return bias_EN.grad

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(20))
    finally:
        torch.set_num_threads(threads)
