# SPDX-License-Identifier: Apache-2.0
"""A run's times without the run: the same config on the modelled clock, with up to 256 slices."""
