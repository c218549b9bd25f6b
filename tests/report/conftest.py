# SPDX-License-Identifier: Apache-2.0
"""Runs that were never trained."""

from made_run import make_run

__all__ = ["make_run"]
