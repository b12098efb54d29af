# Writes the configurations of this pod's server and Sentinel: POD_NAME, REPLICA_PASSWORD and SENTINEL_PASSWORD are set.
set -eu
umask 077
me=$POD_NAME.redis
# A Sentinel that runs knows the master. Where none answers, all pods start at once, and the first one is the master.
master=redis-0.redis
for peer in redis-0.redis redis-1.redis redis-2.redis; do
  told=$(timeout 2 valkey-cli -h "$peer" -p 26379 sentinel get-master-addr-by-name warmfleet 2>/dev/null | head -n 1)
  case $told in
    redis-[012].redis) master=$told; break ;;
  esac
done

cat > /run/config/redis.conf <<END
include /etc/redis/redis.conf
replica-announce-ip $me
masteruser replica
masterauth $REPLICA_PASSWORD
END
if [ "$master" != "$me" ]; then
  echo "replicaof $master 6379" >> /run/config/redis.conf
fi

# Whoever reaches a Sentinel may ask it for the master. Only the Sentinels may change what they know.
cat > /run/config/sentinel.conf <<END
port 26379
bind * -::*
protected-mode no
dir /run/config
user default reset on nopass -@all +ping +info +sentinel|get-master-addr-by-name
user sentinel reset on >$SENTINEL_PASSWORD ~* &* +@all
sentinel sentinel-user sentinel
sentinel sentinel-pass $SENTINEL_PASSWORD
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $me
sentinel monitor warmfleet $master 6379 2
sentinel auth-user warmfleet sentinel
sentinel auth-pass warmfleet $SENTINEL_PASSWORD
sentinel down-after-milliseconds warmfleet 2000
sentinel failover-timeout warmfleet 10000
sentinel parallel-syncs warmfleet 1
END
