#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The coordinator of a run. Given again, it goes on with the run in its folder.
#   CONFIG=myrun.py BIND=10.0.0.5 ADVERTISE=coord.example.org sh coordinator.sh
set -eu
exec geojax coordinator "${CONFIG:-quickstart}" --out "${RUN:-runs/apart}" \
    --grpc.bind "${BIND:-127.0.0.1}" --grpc.port "${PORT:-7000}" \
    --grpc.advertise "${ADVERTISE:-}" "$@"
