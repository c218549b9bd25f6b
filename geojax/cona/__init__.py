# SPDX-License-Identifier: Apache-2.0
"""CONA: the strategy follows the noise of the gradient while a run goes on."""
