"""Figures of sessions and of what packing makes of them."""

from dagpack_hf.view.svg import session_svg

__all__ = ["session_svg"]
