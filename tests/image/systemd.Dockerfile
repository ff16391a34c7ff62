# The unit of deploy/systemd, which is the context, under a real systemd: for test_unit.py.
FROM engram-server:test
USER root
RUN apt-get -qq update && apt-get -qq install -y --no-install-recommends systemd >/dev/null
# As in deploy/README.md, but for the image's own user, who makes way.
RUN userdel engram && useradd --system --user-group --home-dir /var/lib/engram-server --shell /usr/sbin/nologin engram
COPY engram-server.toml /etc/engram/
COPY engram-server.service /etc/systemd/system/
ENTRYPOINT ["/lib/systemd/systemd"]
CMD []
