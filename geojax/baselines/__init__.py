# SPDX-License-Identifier: Apache-2.0
"""Methods to compare with whose rounds do not begin and end for all slices at once."""
