# The server in a container, started with a checkpoint or packed store mounted at /model:
#
#   docker build -t engram-server .
#   docker run --rm --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
#     --security-opt seccomp=deploy/seccomp/engram-server.json --ulimit memlock=-1 \
#     -v /models/DeepSeek-V4.1-Flash:/model:ro -v engram:/run/engram -p 127.0.0.1:50051:50051 -p 127.0.0.1:9464:9464 \
#     engram-server
#
# gRPC is at port 50051 and at /run/engram/engram.sock, shared memory beside it, metrics and probes at port 9464:
# deploy/docker/engram-server.toml. A folder of the host in place of the volume `engram` must belong to user 10001.
# deploy/README.md says why each option is there, and has Compose, Kubernetes and systemd.
#
# Every step is a script, and `make test-image` builds and runs all of this.

FROM debian:bookworm-slim AS build
WORKDIR /src
# A layer of its own: it changes less often than the sources.
COPY scripts/common.sh scripts/setup_system.sh scripts/
RUN scripts/setup_system.sh --runtime
COPY . .
RUN scripts/build_wheel.sh
RUN scripts/check_wheel.sh
RUN scripts/install_wheel.sh /opt/engram

FROM debian:bookworm-slim
COPY scripts/setup_runtime.sh /usr/local/sbin/
RUN /usr/local/sbin/setup_runtime.sh
COPY --from=build /opt/engram /opt/engram
COPY deploy/docker/engram-server.toml /etc/engram/engram-server.toml
# The token map is cached where a read-only root has room, if it has any.
ENV PATH=/opt/engram/bin:$PATH ENGRAM_SERVE_CONFIG=/etc/engram/engram-server.toml XDG_CACHE_HOME=/tmp
USER 10001:10001
VOLUME /run/engram
EXPOSE 50051 9464
# Asks where deploy/docker/engram-server.toml shows metrics: elsewhere, give another with --health-cmd.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/readyz', timeout=4)"]
ENTRYPOINT ["engram-server"]
CMD ["serve"]
