# Actors come and go: an auto-scaling group of spot machines of several types. A machine that will be taken is replaced
# early (capacity rebalancing), and its actors flush what they hold when the notice comes.

module "node" {
  source = "../node"

  run               = var.run
  image_id          = var.machine.image_id
  root_device       = var.machine.root_device
  security_group_id = var.machine.security_group_id
  log_group         = var.machine.log_group
  secret_arn        = var.machine.secret_arn
  public_address    = var.machine.public_address
  role              = "actor"
  instance_type     = var.instance_types[0]
  disk_gb           = var.disk_gb
}

resource "aws_autoscaling_group" "this" {
  name                      = module.node.name
  min_size                  = 0
  max_size                  = max(var.machines, var.max_machines)
  desired_capacity          = var.running ? var.machines : 0
  vpc_zone_identifier       = var.subnet_ids
  health_check_type         = "EC2"
  health_check_grace_period = 300
  wait_for_capacity_timeout = "0" # training begins with the first machine
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

  # New images reach running actors a tenth at a time.
  instance_refresh {
    strategy = "Rolling"

    preferences {
      min_healthy_percentage = 90
    }
  }

  dynamic "tag" {
    for_each = merge(var.run.tags, { Name = module.node.name, Role = "actor" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = false # the launch template tags machines
    }
  }
}
