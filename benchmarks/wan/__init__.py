# SPDX-License-Identifier: Apache-2.0
"""A WAN on one machine: slices in network namespaces, with links and processors of their own."""
