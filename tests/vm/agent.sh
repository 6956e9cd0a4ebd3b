# Runs in the guest, as its process 1: makes the RDMA device, then runs the commands that the host puts into the box.
# A command is a script N.sh; its output goes to N.out, its exit status, at its end, to N.rc. The host rings for each with a
# line on the first serial port: "run N", and "kill N" to end it with all that it started. (Looking into the box again and
# again would cost an emulated processor a tenth of its time.)
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
box=/run/box
option() { # NAME DEFAULT: what the kernel's command line says
    for word in $(cat /proc/cmdline); do
        case $word in rdmarpc.$1=*) echo "${word#*=}" && return ;; esac
    done
    echo "$2"
}

port() { # NUMBER: of the serial ports that the host rings on
    echo /dev/vport*p"$1"
}

ulimit -l unlimited
ulimit -n 65536
hostname "$(option hostname guest)"
echo "rdmarpc: root after $(cut -d' ' -f1 /proc/uptime) s"

link=$(option link veth)
ip link set lo up
if [ "$link" = veth ]; then
    link=v0
    ip link add v0 mtu 4200 type veth peer name v1 mtu 4200
    ip link set v1 up
else
    ip link set "$link" mtu 4200 || echo "rdmarpc: $link keeps its MTU"
fi
ip address add "$(option address 10.77.0.1/24)" dev "$link"
ip link set "$link" up
rdma link add rxe0 type rxe netdev "$link" || echo "rdmarpc: no rxe0"
if [ "$link" = v0 ]; then # a second port, for copies that are parted over two
    ip address add 10.78.0.1/24 dev v1
    rdma link add rxe1 type rxe netdev v1 || echo "rdmarpc: no rxe1"
fi
# The GID of the address appears a moment after the link is up.
for attempt in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    grep -q ffff: /sys/class/infiniband/rxe0/ports/1/gids/1 && grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state && break
    sleep 0.2
done

# The distribution's bindings in another Python of the same version: this folder and nothing else of the distribution's.
mkdir -p /run/python
ln -s /usr/lib/python3/dist-packages/pyverbs /run/python/pyverbs

echo "rdmarpc: ready after $(cut -d' ' -f1 /proc/uptime) s"
cut -d' ' -f1 /proc/uptime > $box/ready.tmp && mv $box/ready.tmp $box/ready

run() { # N
    # Files are kept in memory by name: forget the names, so that what changed on the host is looked at again.
    echo 2 > /proc/sys/vm/drop_caches
    setsid -w bash "$1.sh" > "$1.out" 2>&1 < /dev/null &
    echo $! > "$1.pid"
    wait $!
    echo $? > "$1.rc.tmp"
    mv "$1.rc.tmp" "$1.rc"
}

cd $box || exit 1
while read -r order number; do
    case $order in
        run) run "$number" & ;;
        kill) pkill -KILL -s "$(cat "$number.pid")" ;;
    esac
done < "$(port 1)"
