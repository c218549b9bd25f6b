# SPDX-License-Identifier: Apache-2.0
"""Attention of a block of rows over the keys of a prefix and its own, in one softmax."""
