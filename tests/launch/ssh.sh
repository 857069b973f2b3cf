#!/bin/sh
# In place of ssh, for tests: "hosts" are addresses of this machine, or troubles.
while [ "$1" != -- ]; do shift; done
host=$2
command=$3
case $host in
    me@*) host=${host#me@} ;;
esac
unset MESHWRIGHT_INTERFACE
echo "$$ $host $command" >>"$SSH_LOG"
case $host in
    denied)
        echo 'me@denied: Permission denied (publickey).' >&2
        exit 255
        ;;
    nopython) command=$(echo "$command" | sed 's#[^ ]*/python[^ ]*#/no/python#') ;;
    firewall) export MESHWRIGHT_INTERFACE=198.51.100.1 ;;
    silent) exec sleep 100 ;;
    old) command="export PYTHONPATH=$OLD_PACKAGES:$PYTHONPATH; $(echo "$command" | sed 's#PYTHONPATH=[^ ]*##')" ;;
    small) command=$(echo "$command" | sed 's#exec env#exec env MESHWRIGHT_VIRTUAL=3#') ;;
    mwns*) exec ip netns exec "$host" sh -c "$command" ;;
    127.*) export MESHWRIGHT_INTERFACE="$host" ;;
esac
exec sh -c "$command"
