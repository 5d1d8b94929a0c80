"""Which arguments and TMA wishes go together: permute_x with the first GEMM of an MLP, permute_y with the second."""

from __future__ import annotations

from anabranch.errors import ArgumentError


def check_valid_config_fwd(
    permute_x: bool,
    permute_y: bool,
    use_tma_load_x: bool,
    use_tma_load_w: bool,
    use_tma_store: bool,
    fuse_mul_post: bool,
    is_first_gemm: bool,
) -> None:
    """Raises a ValueError where a forward product cannot have all that is asked for."""
    op = "check_valid_config_fwd"
    _refuse(op, permute_x and permute_y, "permute_y", "False beside permute_x")
    _refuse(
        op, permute_x and not is_first_gemm, "permute_x", "False for the second GEMM, or is_first_gemm=True"
    )
    _refuse(op, permute_y and is_first_gemm, "permute_y", "False for the first GEMM, or is_first_gemm=False")
    _refuse(
        op,
        fuse_mul_post and is_first_gemm,
        "fuse_mul_post",
        "False for the first GEMM, or is_first_gemm=False",
    )
    _refuse(op, use_tma_load_x and permute_x, "use_tma_load_x", "False with permute_x, which gathers rows")
    _refuse(
        op,
        use_tma_store and permute_y and not is_first_gemm,
        "use_tma_store",
        "False with permute_y, which scatters rows",
    )


def check_valid_config_bwd_dW(  # noqa: N802 - the interface's name
    permute_x: bool,
    permute_y: bool,
    use_tma_load_dY: bool,
    use_tma_load_x: bool,
    use_tma_store: bool,
    fuse_mul_post: bool,
    is_first_gemm: bool,
) -> None:
    """Raises a ValueError where the gradient of W cannot have all that is asked for."""
    op = "check_valid_config_bwd_dW"
    _refuse_gathered_dY(op, permute_y, use_tma_load_dY, is_first_gemm)
    _refuse(
        op,
        use_tma_load_x and permute_x and is_first_gemm,
        "use_tma_load_x",
        "False with permute_x, which gathers rows",
    )


def check_valid_config_bwd_dX(  # noqa: N802 - the interface's name
    permute_x: bool,
    permute_y: bool,
    use_tma_load_dY: bool,
    use_tma_load_w: bool,
    use_tma_store: bool,
    fuse_mul_post: bool,
    is_first_gemm: bool,
) -> None:
    """Raises a ValueError where the gradient of X cannot have all that is asked for."""
    op = "check_valid_config_bwd_dX"
    _refuse_gathered_dY(op, permute_y, use_tma_load_dY, is_first_gemm)
    _refuse(
        op,
        use_tma_store and permute_x and is_first_gemm,
        "use_tma_store",
        "False with permute_x, which scatters the gradient's rows",
    )


def _refuse_gathered_dY(op: str, permute_y: bool, use_tma_load_dY: bool, is_first_gemm: bool) -> None:  # noqa: N802
    _refuse(
        op,
        use_tma_load_dY and permute_y and not is_first_gemm,
        "use_tma_load_dY",
        "False with permute_y, which gathers the gradient's rows",
    )


def _refuse(op: str, broken: bool, argument: str, expected: str) -> None:
    if broken:
        raise ArgumentError(op, argument, expected=expected, got="True")
