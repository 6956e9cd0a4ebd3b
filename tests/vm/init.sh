#!/bin/busybox sh
# The first process of a guest. Loads the modules, lays a memory file system over the host's root, then goes on in there
# with agent.sh. Everything it prints goes to the guest's console, which the host keeps as a log.
b=/bin/busybox
$b mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
echo "rdmarpc: init"
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
for module in /modules/*; do
    $b insmod "$module" || echo "rdmarpc: $module could not be loaded"
done

share=trans=virtio,version=9p2000.L,msize=1048576
$b mount -t 9p -o $share,ro,cache=loose root /lower || echo "rdmarpc: no root share"
$b mount -t tmpfs -o size=60% tmpfs /upper
$b mkdir /upper/upper /upper/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/upper/upper,workdir=/upper/work overlay /root
$b mount -t tmpfs tmpfs /root/run
$b mkdir -p /root/run/box /root/run/lock
# Not cached, so that either side sees at once what the other has written.
$b mount -t 9p -o $share,rw,cache=none box /root/run/box || echo "rdmarpc: no box"
for place in proc sys dev; do
    $b mount --move /$place /root/$place
done
$b mkdir -p /root/dev/shm /root/dev/pts
$b mount -t tmpfs tmpfs /root/dev/shm
$b mount -t devpts devpts /root/dev/pts
exec $b switch_root /root /bin/bash /run/box/agent.sh
