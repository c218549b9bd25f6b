# SPDX-License-Identifier: Apache-2.0
"""What fits a cluster and how fast it would be, predicted on any machine."""
