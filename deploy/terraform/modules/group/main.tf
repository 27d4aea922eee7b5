# Machines of a role that keep no state, so any of them may be lost: actors, the evaluator, learners that join. An
# auto-scaling group, of spot machines if desired, replaces a machine before AWS reclaims it (capacity rebalancing).

module "node" {
  source = "../node"

  run           = var.run
  machine       = var.machine
  role          = var.role
  instance_type = var.instance_types[0]
  disk_gb       = var.disk_gb
}

resource "aws_autoscaling_group" "this" {
  name                      = module.node.name
  min_size                  = 0
  max_size                  = max(var.machines, var.max_machines)
  desired_capacity          = var.running ? var.machines : 0
  vpc_zone_identifier       = var.subnet_ids
  health_check_type         = "EC2"
  health_check_grace_period = 300
  wait_for_capacity_timeout = "0" # the run goes on with the machines that there are
  capacity_rebalance        = var.spot

  # For an alarm; they cost nothing.
  enabled_metrics = ["GroupDesiredCapacity", "GroupInServiceInstances"]

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = var.spot ? 0 : 100
      spot_allocation_strategy                 = "price-capacity-optimized"
      on_demand_allocation_strategy            = "lowest-price"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = module.node.launch_template.id
        version            = module.node.launch_template.version
      }

      dynamic "override" {
        for_each = var.instance_types

        content {
          instance_type = override.value
        }
      }
    }
  }

  dynamic "instance_refresh" {
    for_each = var.refresh ? [90] : []

    content {
      strategy = "Rolling"

      preferences {
        min_healthy_percentage = instance_refresh.value
      }
    }
  }

  dynamic "tag" {
    for_each = merge(var.run.tags, { Name = module.node.name, Role = var.role })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = false # the launch template tags machines
    }
  }
}
