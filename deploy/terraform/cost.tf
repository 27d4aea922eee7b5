# An estimate, so that nobody is surprised, without traffic, storage of objects and logs. The prices, with their date, are
# in prices.json, which `troupe cloud estimate` reads as well. docs/aws.md says how to look up today's; hourly_prices_usd
# replaces them.

locals {
  price_list = jsondecode(file("${path.module}/prices.json"))
  monthly    = local.price_list.monthly_usd
  list_prices_usd = merge(local.price_list.hourly_usd, {
    "gp3_gb"        = local.monthly.gp3_gb / 730
    "fixed_monthly" = (local.monthly.encryption_key + local.monthly.dns_zone + local.monthly.alarms) / 730
  })
  prices_usd = merge(local.list_prices_usd, var.hourly_prices_usd)

  # null where a price is not known: a wrong sum would be worse than none
  prices_of = {
    learner      = try(local.prices_usd[var.learner_instance_type], null)
    learner-peer = try(local.prices_usd[var.learner_instance_type], null)
    replay       = try(local.prices_usd[var.replay_instance_type], null)
    actor        = try(max([for type in var.actor_instance_types : local.prices_usd[type]]...), null)
    evaluator    = try(max([for type in var.evaluator_instance_types : local.prices_usd[type]]...), null)
  }

  counts = merge(
    {
      learner   = var.running ? 1 : 0
      replay    = var.running ? var.replay_shards : 0
      actor     = var.running ? local.actor_machines : 0
      evaluator = var.running && var.evaluator ? 1 : 0
    },
    local.peers > 0 ? { learner-peer = var.running ? local.peers : 0 } : {},
  )

  spot_roles = concat(
    var.actor_spot ? ["actor"] : [], var.evaluator_spot ? ["evaluator"] : [], var.learner_peer_spot ? ["learner-peer"] : [],
  )

  disks_gb = {
    learner      = var.learner_disk_gb
    learner-peer = var.learner_disk_gb
    replay       = var.replay_disk_gb
    actor        = var.actor_disk_gb
    evaluator    = var.actor_disk_gb
  }

  public_machines = var.nat_gateway ? 1 : sum(values(local.counts)) # with the gateway: its own address

  cost_parts_usd = merge(
    { for role, count in local.counts : role => count == 0 ? 0 : try(
      count * local.prices_of[role] * (contains(local.spot_roles, role) ? var.spot_price_share : 1), null)
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
