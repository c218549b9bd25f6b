# SPDX-License-Identifier: Apache-2.0
"""Model families on one shared Transformer. Importing this package does not import JAX."""
