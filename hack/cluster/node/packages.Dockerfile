# The Debian side of a kind node: what kind's own images/base/Dockerfile installs, with containerd, runc and the CNI
# plugins from Debian too (kind compiles those three from git). Needs no privileges and changes rarely.
ARG BASE
FROM ${BASE}
USER root
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes \
      systemd \
      conntrack iptables nftables iproute2 ethtool util-linux mount kmod procps hostname \
      containerd runc containernetworking-plugins pigz \
 && apt-get clean \
 && rm -rf /var/lib/apt/lists/* /var/log/* /usr/share/doc/* /usr/share/man/* \
# The node is privileged: anything of the distribution's that systemd would start or set could touch the host.
 && rm -f /lib/systemd/system/multi-user.target.wants/* /etc/systemd/system/*.wants/* \
      /lib/systemd/system/local-fs.target.wants/* /lib/systemd/system/basic.target.wants/* \
      /lib/systemd/system/sockets.target.wants/*udev* /lib/systemd/system/sockets.target.wants/*initctl* \
      /lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service \
      /usr/lib/sysctl.d/* /etc/sysctl.d/* \
 && echo "ReadKMsg=no" >> /etc/systemd/journald.conf \
 && systemctl mask systemd-binfmt.service systemd-logind.service getty.target \
 && ln -sf /lib/systemd/systemd /sbin/init
