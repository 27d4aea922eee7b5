# An estimate, so that nobody is surprised, without traffic, storage of objects and logs. The prices are examples:
# on-demand in us-east-1, written down from memory in November 2026, not checked since. docs/aws.md says how to look up
# today's; hourly_prices_usd replaces them.

locals {
  list_prices_usd = {
    "c5.xlarge"     = 0.17
    "c6a.large"     = 0.0765
    "c6a.xlarge"    = 0.153
    "c6i.large"     = 0.085
    "c6i.xlarge"    = 0.17
    "c6i.2xlarge"   = 0.34
    "c7i.large"     = 0.08925
    "c7i.xlarge"    = 0.1785
    "c7i.2xlarge"   = 0.357
    "g4dn.xlarge"   = 0.526
    "g4dn.2xlarge"  = 0.752
    "g5.xlarge"     = 1.006
    "g5.2xlarge"    = 1.212
    "g6.xlarge"     = 0.8048
    "g6.2xlarge"    = 0.9776
    "m5.large"      = 0.096
    "m5.xlarge"     = 0.192
    "m6i.large"     = 0.096
    "m6i.xlarge"    = 0.192
    "m6i.2xlarge"   = 0.384
    "p3.2xlarge"    = 3.06
    "r5.4xlarge"    = 1.008
    "r6i.large"     = 0.126
    "r6i.xlarge"    = 0.252
    "r6i.2xlarge"   = 0.504
    "r6i.4xlarge"   = 1.008
    "t3.medium"     = 0.0416
    "t3.large"      = 0.0832
    "nat_gateway"   = 0.045
    "public_ip"     = 0.005
    "gp3_gb"        = 0.08 / 730
    "fixed_monthly" = (1 + 0.5 + 0.4) / 730 # encryption key, DNS zone, alarms
  }
  prices_usd = merge(local.list_prices_usd, var.hourly_prices_usd)

  # null where a price is not known: a wrong sum would be worse than none
  prices_of = {
    learner   = try(local.prices_usd[var.learner_instance_type], null)
    replay    = try(local.prices_usd[var.replay_instance_type], null)
    actor     = try(max([for type in var.actor_instance_types : local.prices_usd[type]]...), null)
    evaluator = try(max([for type in var.evaluator_instance_types : local.prices_usd[type]]...), null)
  }

  counts = {
    learner   = var.running ? 1 : 0
    replay    = var.running ? var.replay_shards : 0
    actor     = var.running ? local.actor_machines : 0
    evaluator = var.running && var.evaluator ? 1 : 0
  }

  disks_gb = {
    learner   = var.learner_disk_gb
    replay    = var.replay_disk_gb
    actor     = var.actor_disk_gb
    evaluator = var.actor_disk_gb
  }

  public_machines = var.nat_gateway ? 1 : sum(values(local.counts)) # with the gateway: its own address

  cost_parts_usd = merge(
    { for role, count in local.counts : role => count == 0 ? 0 : try(
      count * local.prices_of[role] * (
        (role == "actor" && var.actor_spot) || (role == "evaluator" && var.evaluator_spot) ? var.spot_price_share : 1
      ), null)
    },
    {
      disks = local.prices_usd["gp3_gb"] * (
        sum([for role, count in local.counts : count * local.disks_gb[role]]) + var.replay_shards * var.replay_volume_gb
      )
      network = (var.nat_gateway ? local.prices_usd["nat_gateway"] : 0) + local.prices_usd["public_ip"] * (
        local.public_machines + (local.public_tensorboard ? 1 : 0)
      )
      fixed = local.prices_usd["fixed_monthly"]
    },
  )
}
