#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Rank 0 is the coordinator, rank i the i-th slice that is named; a node each:
#   mpirun -np 3 --map-by ppr:1:node sh rank.sh COORDINATOR_HOST east west
set -eu
host=$1
shift
rank=$OMPI_COMM_WORLD_RANK
config=${CONFIG:-quickstart} run=${RUN:-runs/apart} port=${PORT:-7000}
if [ "$rank" -eq 0 ]; then
    CONFIG=$config RUN=$run PORT=$port BIND=$host exec sh "$(dirname "$0")/coordinator.sh"
fi
shift $((rank - 1))
exec geojax train "$config" --slice "$1" --coordinator "$host:$port" --out "$run-slices/$1" \
    --grpc.bind "${BIND:-$(hostname -I | cut -d' ' -f1)}" \
    --grpc.port "$((port + rank))"
