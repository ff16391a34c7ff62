# The server in a container, started with a checkpoint mounted at /model:
#
#   docker build -t engram-server .
#   docker run --rm -p 50051:50051 -v /models/DeepSeek-V4.1-Flash:/model:ro engram-server
#
# io_uring: Docker's default seccomp profile refuses its system calls, and the server then says so and reads with
# a pread thread pool. For the full speed of the disk pass --security-opt seccomp=PROFILE.json, a copy of the default
# profile that also allows io_uring_setup, io_uring_enter and io_uring_register. Scales kept in memory (5.7 GiB for
# both full tables) count against --memory.

FROM debian:bookworm-slim AS build
WORKDIR /src
# A layer of its own: it changes less often than the sources.
COPY scripts/common.sh scripts/setup_system.sh scripts/
RUN scripts/setup_system.sh --runtime
COPY . .
RUN scripts/build_wheel.sh && scripts/check_wheel.sh
RUN python3 -m venv /opt/engram \
 && /opt/engram/bin/pip install --no-cache-dir --constraint constraints.txt "$(echo dist/*.whl)[tokenizer]"

FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --no-create-home --shell /usr/sbin/nologin engram
COPY --from=build /opt/engram /opt/engram
ENV PATH=/opt/engram/bin:$PATH
USER engram
EXPOSE 50051
ENTRYPOINT ["engram-server"]
CMD ["serve", "/model", "--listen", "0.0.0.0:50051"]
